"""P-EAGLE inside a target: what it keeps of a text, what a pass drafts, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.head_options import PeagleOptions
from cluster.draft.inside import StepRows
from cluster.draft.registry import check
from cluster.errors import ConfigError
from cluster.spec.noise import gumbel
from cluster.spec.tree import depths
from tests.draft.heads.test_eagle3 import attend_causally
from tests.support.draft.heads import (
    ByRows,
    cyclic_target,
    random_eagle3,
    random_peagle,
    right_peagle,
)
from tests.support.draft.inside import GREEDY, LAWS, Inside, config_of, mean_accepted
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.worker.rounds import Session

DRAFTS = 3


@pytest.fixture(scope="module")
def head_folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_peagle(tmp_path_factory.mktemp("peagle") / "head", llama_folder)


def rows_of(
    inside: Inside, oracle: Any, tokens: Sequence[int]
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """By one plain forward of a text and the masks behind it: keys and values of all but the
    text's first token by layer, and the logits of the rows of the pass."""
    head = inside.drafter._head
    with torch.inference_mode():
        taps = expected_taps(oracle, np.array(tokens[:-1]), inside.drafter.wants.taps).flatten(1)
        taps = torch.cat((taps, head.mask_hidden.expand(DRAFTS - 1, -1)))
        ids = torch.tensor([*tokens[1:], *[head.mask_token_id] * (DRAFTS - 1)])
        positions, kept = torch.arange(len(ids)), []

        def attend(layer: int, *own: torch.Tensor) -> torch.Tensor:
            kept.append(own[1:])
            return attend_causally(*own)

        plan = ByRows(attend)
        hidden = head(ids, head.fuse(taps), positions, plan)
        rotation = head.rotary(hidden, positions[None])
        for layer in head.deeper:
            hidden = layer(hidden[None], position_embeddings=rotation, plan=plan)[0]
        return [(key, value) for key, value in kept], head.logits(hidden)[-DRAFTS:]


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("settings", [{}, {"num_pages": 20}, {"prefix_cache": False}])
def test_what_it_keeps_of_every_layer_is_right_after_chunks_hits_and_preemptions(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    """The second layer's keys depend on all rows before them, of earlier steps and of pages that
    another request wrote."""
    target = checkpoint_factory(architecture)
    head = random_peagle(tmp_path, target)
    inside = Inside(config_of(target, "peagle", head, max_batch_tokens=24, **settings))
    oracle = load_oracle(target)
    host = inside.drafter._cache._host

    def check_layers(rows: StepRows, text: list[int]) -> None:
        slots = torch.from_numpy(host.slots(rows.request_id))
        expected, _ = rows_of(inside, oracle, [*text, rows.next_token])
        held = [layer[slots][1:] for layer in host.caches[:2]]
        for layer, (keys, values) in zip(held, expected, strict=True):
            count = len(layer)
            torch.testing.assert_close(layer[:, 0], keys[:count], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer[:, 1], values[:count], atol=1e-4, rtol=1e-4)

    inside.decode_checked(check_layers)


@LAWS
def test_each_depth_has_its_rows_best_tokens_by_the_targets_noise(
    params: SamplingParams, llama_folder: Path, head_folder: Path
) -> None:
    """After a prompt in chunks, and of two requests in one pass."""
    options = {"num_children": 2, "min_survival": 1e-9, "num_candidates": 64}
    config = config_of(llama_folder, "peagle", head_folder, max_batch_tokens=16, options=options)
    inside, oracle = Inside(config), load_oracle(llama_folder)
    for name, length in (("a", 27), ("b", 11)):
        session = Session(name, prompt(length, seed=length).tolist(), params)
        inside.draw(session)
        tree = inside.tree(session, 14)
        _, logits = rows_of(inside, oracle, session.tokens)
        ids = inside.drafter._vocabulary.target_ids
        depth = depths(tree.parents)
        for ahead in range(DRAFTS):
            scores = logits[ahead].double().numpy()
            if params.temperature:
                scores = scores + gumbel(params.noise_key, 1 + ahead, ids, params.stream)
            best = set(ids[np.argsort(-scores)[:2]].tolist())
            assert set(tree.token_ids[depth == ahead + 1].tolist()) == best
        assert len(tree) == 2 + 4 + 8


def test_a_pass_over_several_texts_is_the_passes_over_each(
    llama_folder: Path, head_folder: Path
) -> None:
    inside = Inside(config_of(llama_folder, "peagle", head_folder))
    drafter, found = inside.drafter, {}
    run = drafter._logits
    for name in ("a", "b"):
        session = Session(name, prompt(9 if name == "a" else 20).tolist(), GREEDY)
        inside.draw(session)
        inside.tree(session, 8)
        request = drafter._requests.find(name)
        found[name] = (request, drafter._input(request))
    (first, one), (second, other) = found.values()
    with torch.inference_mode():
        both = run([first, second], [one, other])
        each = torch.cat((run([first], [one]), run([second], [other])))
    torch.testing.assert_close(both, each, atol=1e-5, rtol=1e-5)


@LAWS
def test_a_head_that_is_right_saves_steps(params: SamplingParams, tmp_path: Path) -> None:
    inside = Inside(config_of(cyclic_target(tmp_path / "t"), "peagle", right_peagle(tmp_path)))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    assert mean_accepted(session) > 0.9


def test_a_head_of_nan_drafts_nothing(llama_folder: Path, tmp_path: Path) -> None:
    head = random_peagle(tmp_path, llama_folder, fill=float("nan"))
    inside = Inside(config_of(llama_folder, "peagle", head))
    inside.check_silent()


def test_without_the_last_row_nothing_is_drafted(llama_folder: Path, head_folder: Path) -> None:
    inside = Inside(config_of(llama_folder, "peagle", head_folder))
    inside.after_step = lambda rows: None
    inside.decode([Session("a", prompt(9).tolist(), GREEDY)], 4)
    assert all(len(tree) == 0 for tree in inside.trees)


@pytest.mark.parametrize("kinds", [("eagle3", random_peagle, "peagle"),
                                   ("peagle", random_eagle3, "eagle3")])  # fmt: skip
def test_the_other_kind_of_head_is_refused_with_its_name(
    kinds: tuple[str, Callable[..., Path], str], llama_folder: Path, tmp_path: Path
) -> None:
    """An EAGLE-3 drafter would run a P-EAGLE head one token at a time, as it was never trained."""
    kind, make, other = kinds
    with pytest.raises(ConfigError, match=f"read by the kind of drafter {other}"):
        Inside(config_of(llama_folder, kind, make(tmp_path, llama_folder)))


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "model: missing"), ({"num_drafts": -1}, "num_drafts: -1 is out of range"),
     ({"context": 0}, "context: 0 is out of range")],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    from cluster.config.schema import DrafterConfig

    given = {"model": "x", **options} if options else {}
    with pytest.raises(ConfigError, match=rf"drafters\.head\.options\.{said}"):
        check("head", DrafterConfig(kind="peagle", options=given))


def test_outside_of_a_target_it_says_where_it_belongs(head_folder: Path) -> None:
    from cluster.draft.product import PeagleDrafter

    with pytest.raises(ConfigError, match=r"drafters\.head\.placement"):
        PeagleDrafter(DrafterContext("head", 8, 8), PeagleOptions(model=str(head_folder)))
