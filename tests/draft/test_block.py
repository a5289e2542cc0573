"""Block drafters inside a target: what they keep of a text, what they draft, what that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.head_options import BlockOptions
from cluster.draft.inside import StepRows
from cluster.draft.registry import check
from cluster.errors import ConfigError
from tests.support.draft.blocks import random_block, right_block
from tests.support.draft.heads import ByRows, cyclic_target, random_medusa
from tests.support.draft.inside import GREEDY, LAWS, SAMPLED, Inside, config_of, mean_accepted
from tests.support.engine.driver import load_oracle, prompt
from tests.support.engine.taps import expected_taps
from tests.support.worker.rounds import Session

Factory = Callable[..., Path]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.fixture(scope="module")
def dflash(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_block(tmp_path_factory.mktemp("block") / "head", llama_folder, spark=False)


def kept_of(inside: Inside, oracle: Any, tokens: Sequence[int]) -> Any:
    """Keys and values of all tokens by layer, by a plain forward of the whole text."""
    head = inside.drafter._head
    with torch.inference_mode():
        taps = expected_taps(oracle, np.array(tokens), inside.drafter.wants.taps)
        return head.keys_values(head.fuse(taps.flatten(1)), torch.arange(len(tokens)))


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("settings", [{}, {"num_pages": 44}, {"prefix_cache": False}])
def test_what_it_keeps_is_right_after_chunks_hits_accepted_paths_and_preemptions(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Factory, tmp_path: Path
) -> None:
    target = checkpoint_factory(architecture)
    head = random_block(tmp_path, target, spark=True)
    inside = Inside(config_of(target, "block", head, max_batch_tokens=24, **settings))
    oracle = load_oracle(target)
    host = inside.drafter._cache._host

    def check_layers(rows: StepRows, text: list[int]) -> None:
        slots = torch.from_numpy(host.slots(rows.request_id)[: len(text)])
        for cache, (keys, values) in zip(host.caches, kept_of(inside, oracle, text), strict=False):
            torch.testing.assert_close(cache[slots][:, 0], keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(cache[slots][:, 1], values, atol=1e-4, rtol=1e-4)

    inside.decode_checked(check_layers)
    assert any(len(tree) > 1 for tree in inside.trees)


@pytest.mark.parametrize("keys", [{}, SLIDING, SLIDING | {"is_causal": False}])
def test_a_block_behind_a_prefix_hit_is_that_of_a_plain_forward(
    keys: dict[str, Any], llama_folder: Path, tmp_path: Path
) -> None:
    """Two texts at a time, whose contexts differ in length."""
    head_folder = random_block(tmp_path, llama_folder, spark=False, **keys)
    inside = Inside(config_of(llama_folder, "block", head_folder, max_batch_tokens=16))
    oracle, head = load_oracle(llama_folder), inside.drafter._head
    found: dict[int, torch.Tensor] = {}
    run = inside.drafter._run

    def recorded(blocks: Sequence[Any]) -> torch.Tensor:
        hidden = run(blocks)
        found.update(
            {len(block.request.text): row for block, row in zip(blocks, hidden, strict=True)}
        )
        return hidden

    inside.drafter._run = recorded
    ids = prompt(27).tolist()
    for name, session in {"a": Session("a", ids, GREEDY), "b": Session("b", ids, GREEDY)}.items():
        inside.decode([session], 3 if name == "a" else 5)
        for length, row in found.items():
            tokens = session.tokens[:length]
            kept = kept_of(inside, oracle, tokens[:-1])

            def attend(
                layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                kept: Any = kept,
            ) -> torch.Tensor:  # fmt: skip
                keys, values = (
                    torch.cat(pair).repeat_interleave(2, dim=1)
                    for pair in zip(kept[layer], (key, value), strict=True)
                )
                places = torch.arange(len(keys))
                behind = places[-len(query) :, None] - places
                sight = head.spec.sights[layer]
                seen = torch.ones_like(behind, dtype=torch.bool)
                if sight.window:
                    seen &= behind < sight.window
                if sight.is_causal:
                    seen &= behind >= 0
                scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                return torch.einsum("hqk,khd->qhd", weights, values)

            with torch.inference_mode():
                wanted = head(torch.tensor(tokens[-1:]), torch.tensor([length - 1]), ByRows(attend))
            torch.testing.assert_close(row, wanted[0], atol=1e-4, rtol=1e-4)
    assert len(found) >= 3


def test_rows_that_are_missing_are_left_out_and_without_the_last_nothing_is_drafted(
    llama_folder: Path, dflash: Path
) -> None:
    inside = Inside(config_of(llama_folder, "block", dflash, max_batch_tokens=16))
    session = Session("a", prompt(40).tolist(), GREEDY)
    inside.lose_steps(2, 5)
    inside.draw(session)
    cache, tokens = inside.drafter._cache, np.array(session.tokens, np.int32)
    assert cache.read("a", tokens).positions.tolist() == [*range(16), *range(32, 40)]
    cache._context_len = 10
    assert cache.read("a", tokens).positions.tolist() == [*range(32, 40)]
    cache._context_len = 4096
    assert len(inside.tree(session, 8)) == 3
    lengths = []
    for _ in range(3):
        inside.draw(session)
        lengths.append(len(inside.tree(session, 8)))
    assert lengths == [3, 0, 3]


@pytest.mark.parametrize("spark", [True, False])
def test_a_block_is_one_chain_as_long_as_may_be_asked_for(
    spark: bool, llama_folder: Path, tmp_path: Path
) -> None:
    inside = Inside(
        config_of(llama_folder, "block", random_block(tmp_path, llama_folder, spark=spark))
    )
    for max_nodes, length in ((8, 4 if spark else 3), (2, 2)):
        session = Session(f"r{max_nodes}", prompt(9).tolist(), SAMPLED)
        inside.draw(session)
        tree = inside.tree(session, max_nodes)
        assert tree.parents.tolist() == list(range(-1, length - 1))


@LAWS
def test_a_drafter_that_is_right_saves_steps(params: SamplingParams, tmp_path: Path) -> None:
    target = cyclic_target(tmp_path / "target")
    inside = Inside(config_of(target, "block", right_block(tmp_path / "head")))
    session = Session("a", [5, 6, 7, 8], params)
    inside.decode([session], 120)
    assert mean_accepted(session) > (1.5 if params is SAMPLED else 5.0)


def test_greedy_survival_is_what_the_confidence_head_says(tmp_path: Path) -> None:
    target = cyclic_target(tmp_path / "target")
    inside = Inside(config_of(target, "block", right_block(tmp_path / "head")))
    found = []
    propose = inside.drafter.propose

    def recorded(tasks: Any) -> Any:
        proposals = propose(tasks)
        found.extend(each.survival for each in proposals)
        return proposals

    inside.drafter.propose = recorded
    for params in (GREEDY, SAMPLED):
        inside.decode([Session(f"{params.temperature}", [5, 6, 7, 8], params)], 2)
    sure = torch.sigmoid(torch.tensor(3.0)).item()
    assert found[0].tolist() == pytest.approx([sure**depth for depth in range(1, 7)], abs=1e-5)
    assert not np.allclose(found[-1], found[0])


def test_one_of_a_random_drafter_saves_hardly_any(llama_folder: Path, dflash: Path) -> None:
    inside = Inside(config_of(llama_folder, "block", dflash))
    session = Session("a", prompt(9).tolist(), SAMPLED)
    inside.decode([session], 60)
    assert any(len(tree) for tree in inside.trees)
    assert sum(len(verdict.path) for verdict in session.verdicts) < 15


@pytest.mark.parametrize("spark", [True, False])
def test_a_drafter_of_nan_drafts_nothing(spark: bool, llama_folder: Path, tmp_path: Path) -> None:
    head = random_block(tmp_path, llama_folder, spark=spark, fill=float("nan"))
    inside = Inside(config_of(llama_folder, "block", head))
    inside.check_silent()


def test_another_kind_of_head_is_refused_by_name(llama_folder: Path, tmp_path: Path) -> None:
    head = random_medusa(tmp_path, llama_folder)
    with pytest.raises(ConfigError, match="holds no DFlash or DSpark drafter"):
        Inside(config_of(llama_folder, "block", head))


def test_outside_of_a_target_it_says_where_it_belongs(dflash: Path) -> None:
    from cluster.draft.block_drafter import BlockDrafter

    with pytest.raises(ConfigError, match=r"drafters\.head\.placement: .* \{with: target\}"):
        BlockDrafter(DrafterContext("head", 8, 8), BlockOptions(model=str(dflash)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model: missing"),
        ({"model": "x", "context": 0}, "context: 0 is out of range"),
        ({"model": "x", "num_candidates": 0}, "num_candidates: 0 is out of range"),
        ({"model": "x", "depth": 3}, "depth: unknown key"),
    ],
)
def test_bad_options_are_named(
    options: dict[str, Any], message: str, llama_folder: Path, dflash: Path
) -> None:
    config = config_of(llama_folder, "block", dflash).drafters["head"]
    object.__setattr__(config, "options", options)
    with pytest.raises(ConfigError, match=message):
        check("head", config)
