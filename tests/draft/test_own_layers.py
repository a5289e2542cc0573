"""The target's own layers draft what a model of these layers alone would write; early exit does so
on the target's own keys and values, and computes nothing twice."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config.schema import Config, DrafterConfig
from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.draft.host import Host
from cluster.draft.lm import LMDrafter
from cluster.engine.engine import Engine
from tests.support.choices import by_day
from tests.support.draft.author import Author, draft_engine, write
from tests.support.draft.inside import GREEDY, LAWS, Inside, alike, config_of
from tests.support.engine.driver import prompt
from tests.support.engine.integrity import check_integrity
from tests.support.engine.native import needs_native
from tests.support.engine.parts import plain
from tests.support.errors import config_error
from tests.support.worker.rounds import Session

PROMPT = [5, 6, 7, 90, 91, 5, 6, 7]
DRAFTS = {
    "early_exit": {"exit_layer": 2},
    "layer_skip": {"skip_layers": [1], "num_pages": 64},
}


def made(engine: Engine, kind: str, **options: Any) -> LMDrafter:
    """The drafter as the worker makes it."""
    settings = DrafterConfig(kind=kind, options=options)
    host = Host(engine, Config(drafters={"own": settings}), "own")
    context = DrafterContext("own", 16, 4, engine.vocab_size, engine.tokenizer_hash, host)
    return registry.create("own", settings, context)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory(request.param)


def test_the_likeliest_drafts_are_the_text_of_these_layers(folder: Path):
    target = draft_engine(folder)
    layers = [0, *range(2, len(target.layers))]
    drafter = made(target, "layer_skip", min_survival=1e-4, **DRAFTS["layer_skip"])
    tree = write(drafter, Author(PROMPT), []).tree
    path = greedy_path(tree.token_ids.tolist(), tree.parents.tolist())
    assert len(path) >= 2
    assert path == greedy_text(folder, layers, PROMPT, len(path))
    drafter.release(["a"])
    assert drafter.pages_in_use == 0


def greedy_path(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The first child of each node: siblings stand in the order of their survival."""
    path, node = [], -1
    while node in parents:
        node = parents.index(node)
        path.append(tokens[node])
    return path


def greedy_text(folder: Path, layers: Sequence[int], start: Sequence[int], count: int) -> list[int]:
    text = list(start)
    for _ in range(count):
        text.append(int(plain(folder, layers, token_array(text)).argmax()))
    return text[len(start) :]


@pytest.mark.parametrize("kind", DRAFTS)
def test_it_grows_natively_where_its_target_does(llama_folder: Path, kind: str):
    target = draft_engine(llama_folder)
    drafter = made(target, kind, **DRAFTS[kind])
    assert (drafter.engine.grower is None) == (target.grower is None)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("early_exit", {}, "exit_layer: 0 layers cannot draft"),
        ("early_exit", {"exit_layer": 3}, "exit_layer: 3 is not below the 3 layers"),
        ("layer_skip", {}, "skip_layers: none is skipped"),
        ("layer_skip", {"skip_layers": [1, 1]}, r"skip_layers: \[1, 1\] names a layer twice"),
        ("layer_skip", {"skip_layers": [7]}, "skip_layers: 7 is none of the target's 3 layers"),
        ("layer_skip", {"skip_layers": [0, 1, 2]}, "skip_layers: they are all"),
        ("early_exit", {"exit_layer": 1, "width": 0}, "width: 0 is out of range"),
        ("layer_skip", {"skip_layers": [1], "min_survival": 1.0}, "min_survival: 1 is out of"),
        ("early_exit", {"exit_layer": 1, "num_pages": 9}, "num_pages: unknown key"),
        ("layer_skip", {"skip_layers": [1], "memory_fraction": 0.0}, "memory_fraction: 0 is"),
    ],
)
def test_wrong_options_are_refused_with_their_path(
    llama_folder: Path, kind: str, options: dict[str, Any], message: str
):
    with config_error(rf"drafters\.own\.options\.{message}") as raised:
        made(draft_engine(llama_folder), kind, **options)
    assert raised.value.param.startswith("drafters.own.options.")


def test_layers_of_a_target_on_several_ranks_are_refused(llama_folder: Path):
    engine = draft_engine(llama_folder)
    engine.config = replace(engine.config, tensor_parallel=2)
    with config_error("several ranks cannot draft"):
        made(engine, "early_exit", exit_layer=1)


OPTIONS = {"exit_layer": 2, "min_survival": 1e-4}


def opened(folder: Path, *, native: bool = True, **settings: Any) -> Inside:
    inside = Inside(config_of(folder, "early_exit", options=OPTIONS, **settings))
    if not native:
        inside.drafter._rules = None
    return inside


def recorded(inside: Inside) -> list[tuple[list[int], torch.Tensor]]:
    """Every row that drafts: the text it stands for, and its logits.  Rows of a native call are
    not seen."""
    found = []
    expand = inside.drafter._expand

    def expanded(rows, logits):
        for (request, node), each in zip(rows, logits, strict=True):
            text = request.text.token_ids[: request.root_len].tolist()
            found.append(([*text, *request.tree.path_tokens(node)], each.clone()))
        expand(rows, logits)

    inside.drafter._expand = expanded
    return found


CASES = list(
    product(
        ("llama", "gemma2", "mistral-sliding"),
        ({}, {"num_pages": 24}, {"prefix_cache": False, "attention": "sdpa"}),
    )
)


@pytest.mark.parametrize(("architecture", "settings"), by_day(CASES[::4], CASES))
def test_every_row_is_that_of_these_layers_alone(
    architecture: str, settings: dict[str, Any], checkpoint_factory: Callable[..., Path]
):
    """Behind prompts in chunks, prefix hits, accepted paths, windows left and preemptions."""
    folder = checkpoint_factory(architecture)
    inside = opened(folder, native=False, max_batch_tokens=24, **settings)
    rows = recorded(inside)
    sessions = alike()
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
    params: SamplingParams, checkpoint_factory: Callable[..., Path]
):
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


def test_without_a_page_to_spare_nothing_is_drafted(llama_folder: Path):
    """The text goes on: drafts take no page that they cannot have."""
    inside = opened(llama_folder, num_pages=8)  # of four tokens
    session = Session("a", prompt(21).tolist(), GREEDY)
    inside.decode([session], 8, max_nodes=2)
    assert len(session.tokens) >= 29
    assert not all(len(tree) for tree in inside.trees)


def test_a_text_that_the_target_does_not_hold_is_left_alone(llama_folder: Path):
    inside = opened(llama_folder)
    session = Session("a", prompt(9).tolist(), GREEDY)
    assert len(inside.tree(session, 4)) == 0
    inside.draw(session)
    assert len(inside.tree(session, 4)) > 0
    held = inside.engine.page_owners.sequences["a"]
    held.tree = TokenTree.of([7], [-1])
    assert not inside.drafter.engine.prepare("a", held.cached_len + 1, 4)  # its rows stay
    held.tree = EMPTY_TREE
    inside.engine.page_owners.evacuate(held)
    session.record.tokens.append(token_array([5]))
    assert len(inside.tree(session, 4)) == 0
