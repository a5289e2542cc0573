"""Early exit drafts on the target's own keys and values: right everywhere, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from tests.support.choices import by_day
from tests.support.draft.inside import GREEDY, LAWS, Inside, config_of
from tests.support.engine.driver import prompt
from tests.support.engine.integrity import check_integrity
from tests.support.engine.native import needs_native
from tests.support.engine.parts import plain
from tests.support.worker.rounds import Session

Factory = Callable[..., Path]
OPTIONS = {"exit_layer": 2, "min_survival": 1e-4}


def opened(folder: Path, *, native: bool = True, **settings: Any) -> Inside:
    inside = Inside(config_of(folder, "early_exit", options=OPTIONS, **settings))
    if not native:
        inside.drafter._rules = None
    return inside


def recorded(inside: Inside) -> list[tuple[list[int], torch.Tensor]]:
    """Every row that drafts: the text it stands for, and its logits.  Rows of a native call are
    not seen."""
    found: list[tuple[list[int], torch.Tensor]] = []
    expand = inside.drafter._expand

    def expanded(rows: Sequence[Any], logits: torch.Tensor) -> None:
        for (request, node), each in zip(rows, logits, strict=True):
            text = request.text.token_ids[: request.root_len].tolist()
            found.append(([*text, *request.tree.path_tokens(node)], each.clone()))
        expand(rows, logits)

    inside.drafter._expand = expanded
    return found


CASES: Any = [
    *product(
        ("llama", "gemma2", "mistral-sliding"),
        ({}, {"num_pages": 24}, {"prefix_cache": False, "attention": "sdpa"}),
    )
]


@pytest.mark.parametrize(("architecture", "settings"), by_day(CASES[::4], CASES))
def test_every_row_is_that_of_these_layers_alone(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Factory
) -> None:
    """Behind prompts in chunks, prefix hits, accepted paths, windows left and preemptions."""
    folder = checkpoint_factory(architecture)
    inside = opened(folder, native=False, max_batch_tokens=24, **settings)
    rows = recorded(inside)
    shared = prompt(30, seed=5).tolist()
    sessions = [Session(str(i), shared + prompt(i * 9, seed=i).tolist(), GREEDY) for i in range(3)]
    inside.decode(sessions[:1], 6)
    inside.decode(sessions[1:], 8)
    assert len(rows) > 40
    for text, logits in rows[:: len(rows) // 24]:
        expected = plain(folder, [0, 1], token_array(text))
        torch.testing.assert_close(logits[: len(expected)], expected, atol=2e-4, rtol=2e-4)
    check_integrity(inside.engine)
    assert inside.engine.pages_in_use == 0


@LAWS
@needs_native
def test_native_trees_are_those_of_passes_one_by_one(
    params: SamplingParams, checkpoint_factory: Factory
) -> None:
    folder = checkpoint_factory("qwen3")
    trees = []
    for native in (True, False):
        inside = opened(folder, native=native)
        assert native == (inside.drafter._rules is not None)
        session = Session("a", prompt(25).tolist(), params)
        inside.decode([session], 24)
        trees.append([(t.token_ids.tolist(), t.parents.tolist()) for t in inside.trees])
    assert trees[0] == trees[1]
    assert max(len(tokens) for tokens, _ in trees[0]) == 8


def test_without_a_page_to_spare_nothing_is_drafted(llama_folder: Path) -> None:
    """The text goes on: drafts take no page that they cannot have."""
    inside = opened(llama_folder, num_pages=8)  # of four tokens
    session = Session("a", prompt(21).tolist(), GREEDY)
    inside.decode([session], 8, max_nodes=2)
    assert len(session.tokens) >= 29
    assert not all(len(tree) for tree in inside.trees)


def test_a_text_that_the_target_does_not_hold_is_left_alone(llama_folder: Path) -> None:
    inside = opened(llama_folder)
    session = Session("a", prompt(9).tolist(), GREEDY)
    assert len(inside.tree(session, 4)) == 0
    inside.verifier.submit([session.item()])
    session.take(inside.verifier.step().verdicts[0])
    assert len(inside.tree(session, 4)) > 0
    held = inside.engine.page_owners.sequences["a"]
    held.tree = TokenTree.of([7], [-1])
    assert not inside.drafter.engine.prepare("a", held.cached_len + 1, 4)  # its rows stay
    held.tree = EMPTY_TREE
    inside.engine.page_owners.evacuate(held)
    session.record.tokens.append(token_array([5]))
    assert len(inside.tree(session, 4)) == 0
