"""EAGLE-3 inside a target: what it keeps of a text, what it drafts from it, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.head_options import Eagle3Options
from cluster.draft.registry import check
from cluster.errors import ConfigError
from tests.draft.heads.test_eagle3 import CAUSAL
from tests.support.draft.heads import cyclic_target, random_eagle3, right_eagle3
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.worker.rounds import Session

Factory = Callable[..., Path]


@pytest.fixture(scope="module")
def head_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_eagle3(tmp_path_factory.mktemp("eagle3") / "head", llama_folder)


def rows_of(inside: Inside, oracle: Any, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """By plain forwards of the whole text: hidden rows of all tokens, keys and values of all but
    the first, and the head's logits behind each of these."""
    head, ids = inside.drafter._head, torch.tensor(tokens)
    with torch.inference_mode():
        taps = expected_taps(oracle, np.array(tokens), inside.drafter.wants.taps)
        fused = head.fuse(taps.flatten(1))
        positions = torch.arange(len(tokens) - 1)
        ((keys, values),) = head.keys_values(ids[1:], fused[:-1], positions, CAUSAL)
        logits = head.logits(head(ids[1:], fused[:-1], positions, CAUSAL))
    return fused, keys, values, logits


def check_cache(inside: Inside, oracle: Any, request_id: str, tokens: Sequence[int]) -> None:
    """What lies in the target's pages is what plain forwards give."""
    kv, hidden, _ = inside.drafter._cache._host.caches
    slots = torch.from_numpy(inside.drafter._cache._host.slots(request_id))
    held = list(tokens)[: len(slots)]
    assert len(slots) >= len(tokens) - 1
    fused, keys, values, _ = rows_of(inside, oracle, held)
    size = fused.shape[1]
    torch.testing.assert_close(hidden[slots].flatten(1)[:, :size], fused, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv[slots][1:, 0], keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(kv[slots][1:, 1], values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "gemma2"])
@pytest.mark.parametrize("settings", [{}, {"num_pages": 20}, {"prefix_cache": False}])
def test_what_it_keeps_is_right_after_chunks_hits_accepted_paths_and_preemptions(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Factory, tmp_path: Path
) -> None:
    target = checkpoint_factory(architecture)
    head = random_eagle3(tmp_path, target)
    inside = Inside(config_of(target, "eagle3", head, max_batch_tokens=24, **settings))
    oracle = load_oracle(target)
    sessions = inside.decode_checked(
        lambda rows, text: check_cache(inside, oracle, rows.request_id, text)
    )
    if "num_pages" in settings and architecture == "llama":
        assert sum(session.num_misses for session in sessions) > 0


def test_the_logits_of_root_and_nodes_are_those_of_a_plain_forward(
    llama_folder: Path, head_folder: Path
) -> None:
    """Behind a prefix hit, too; a node's path is fed the head's own outputs."""
    inside = Inside(config_of(llama_folder, "eagle3", head_folder, max_batch_tokens=16))
    oracle = load_oracle(llama_folder)
    found: list[tuple[int, torch.Tensor]] = []
    run = inside.drafter._run

    def recorded(rows: Sequence[Any]) -> torch.Tensor:
        logits = run(rows)
        found.extend((node, each) for (_, node), each in zip(rows, logits, strict=True))
        return logits

    inside.drafter._run = recorded
    for name in ("a", "b"):
        session = Session(name, prompt(27).tolist(), GREEDY)
        inside.draw(session)
        found.clear()
        inside.tree(session, 8)
        head, tree = inside.drafter._head, inside.drafter._requests.find(name).tree
        fused, *_, logits = rows_of(inside, oracle, [*session.tokens])
        torch.testing.assert_close(found[0][1], logits[-1], atol=1e-4, rtol=1e-4)
        assert len(found) > 4
        for node, got in found[1:]:
            ids, hidden = torch.tensor(session.tokens)[1:], fused[:-1]
            for token in tree.path_tokens(node):
                with torch.inference_mode():
                    positions = torch.arange(len(ids))
                    out = head(ids, hidden, positions, CAUSAL)
                    ids = torch.cat((ids, torch.tensor([token])))
                    hidden = torch.cat((hidden, head.handed_on(out)[-1:]))
            with torch.inference_mode():
                out = head(ids, hidden, torch.arange(len(ids)), CAUSAL)
                torch.testing.assert_close(got, head.logits(out)[-1], atol=1e-4, rtol=1e-4)
        inside.verifier.release([name])


def test_rows_that_are_missing_are_left_out_and_without_the_last_nothing_is_drafted(
    llama_folder: Path, head_folder: Path
) -> None:
    inside = Inside(config_of(llama_folder, "eagle3", head_folder, max_batch_tokens=16))
    session = Session("a", prompt(40).tolist(), GREEDY)
    inside.lose_steps(2, 5)
    inside.draw(session)
    cache, tokens = inside.drafter._cache, np.array(session.tokens, np.int32)
    context = cache.read("a", tokens)
    assert len(context.positions) == 40 - 1 - 16  # without the first token and the second chunk
    cache._context_len = 6
    assert len(cache.read("a", tokens).positions) == 6
    cache._context_len = 2048
    assert len(inside.tree(session, 8)) > 0
    lengths = []
    for _ in range(3):
        inside.draw(session)
        lengths.append(len(inside.tree(session, 8)))
    assert lengths[1] == 0
    assert min(lengths[0], lengths[2]) > 0


def test_another_target_that_takes_over_drafts_from_its_own_rows(
    llama_folder: Path, head_folder: Path
) -> None:
    first, second = (
        Inside(config_of(llama_folder, "eagle3", head_folder, max_batch_tokens=16))
        for _ in range(2)
    )
    oracle, session = load_oracle(llama_folder), Session("a", prompt(27).tolist(), GREEDY)
    first.decode([session], 10)
    session.record.held_len, session.record.generation = 0, 1
    second.verifier.submit([session.item()])
    while second.verifier.has_pending:
        frame = second.verifier.step()
    session.take(frame.verdicts[0])
    check_cache(second, oracle, "a", session.tokens)
    assert len(second.tree(session, 8)) > 0
    whole = Session("b", prompt(27).tolist(), GREEDY)
    first.decode([whole], len(session.output))
    assert whole.output[: len(session.output)] == session.output


@pytest.mark.parametrize("reduced", [24, 20])
@LAWS
def test_a_head_that_is_right_saves_steps(
    params: SamplingParams, reduced: int, tmp_path: Path
) -> None:
    target = cyclic_target(tmp_path / "target")
    head = right_eagle3(tmp_path / "head", reduced=reduced)
    inside = Inside(config_of(target, "eagle3", head))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    # With a reduced vocabulary a path ends before the tokens that the head cannot write.
    assert mean_accepted(session) > (1.5 if params is SAMPLED else 5.0 if reduced == 24 else 2.5)


def test_one_of_a_random_head_saves_hardly_any(llama_folder: Path, head_folder: Path) -> None:
    inside = Inside(config_of(llama_folder, "eagle3", head_folder))
    session = Session("a", prompt(9).tolist(), SAMPLED)
    inside.decode([session], 60)
    assert any(len(tree) for tree in inside.trees)
    assert sum(len(verdict.path) for verdict in session.verdicts) < 15


def test_a_head_of_nan_drafts_nothing(llama_folder: Path, tmp_path: Path) -> None:
    head = random_eagle3(tmp_path, llama_folder, fill=float("nan"))
    inside = Inside(config_of(llama_folder, "eagle3", head))
    inside.check_silent()


def test_outside_of_a_target_it_says_where_it_belongs(head_folder: Path) -> None:
    from cluster.draft.eagle3 import Eagle3Drafter

    options = Eagle3Options(model=str(head_folder))
    with pytest.raises(ConfigError, match=r"drafters\.head\.placement: .* \{with: target\}"):
        Eagle3Drafter(DrafterContext("head", 8, 8), options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model: missing"),
        ({"num_children": 40}, "num_children: 40 exceeds"),
        ({"context": 0}, "context: 0 is out of range"),
        ({"width": 0}, "width: 0 is out of range"),
        ({"depth": 3}, "depth: unknown key"),
    ],
)
def test_bad_options_are_named(
    options: dict[str, Any], message: str, llama_folder: Path, head_folder: Path
) -> None:
    model = {"model": str(head_folder)} if options else {}
    config = config_of(llama_folder, "eagle3", head_folder).drafters["head"]
    object.__setattr__(config, "options", {**model, **options})
    with pytest.raises(ConfigError, match=message):
        check("head", config)
