"""The target's own layers draft what a model of these layers alone would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.core import token_array
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.draft.lm import LMDrafter
from cluster.engine.engine import Engine
from cluster.errors import ConfigError
from cluster.worker.host import EngineHost
from tests.support.draft.author import Author, draft_engine, grow
from tests.support.engine.parts import plain

PROMPT = [5, 6, 7, 90, 91, 5, 6, 7]
DRAFTS: dict[str, dict[str, Any]] = {
    "early_exit": {"exit_layer": 2},
    "layer_skip": {"skip_layers": [1], "num_pages": 64},
}


def made(engine: Engine, kind: str, **options: Any) -> LMDrafter:
    """The drafter as the worker makes it."""
    settings = DrafterConfig(kind=kind, options=options)
    host = EngineHost(engine, Config(drafters={"own": settings}), "own")
    context = DrafterContext("own", 16, 4, engine.vocab_size, engine.tokenizer_hash, host)
    drafter = registry.create("own", settings, context)
    assert isinstance(drafter, LMDrafter)
    return drafter


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory(request.param)


def test_the_likeliest_drafts_are_the_text_of_these_layers(folder: Path) -> None:
    target = draft_engine(folder)
    layers = [0, *range(2, len(target.layers))]
    drafter = made(target, "layer_skip", min_survival=1e-4, **DRAFTS["layer_skip"])
    author = Author(PROMPT)
    drafter.observe([author.opening()])
    tree = grow(drafter, author)["a"].tree
    path = greedy_path(tree.token_ids.tolist(), tree.parents.tolist())
    assert len(path) >= 2
    assert path == greedy_text(folder, layers, len(path))
    drafter.release(["a"])
    assert drafter.pages_in_use == 0


def greedy_path(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The first child of each node: siblings stand in the order of their survival."""
    path, node = [], -1
    while node in parents:
        node = parents.index(node)
        path.append(tokens[node])
    return path


def greedy_text(folder: Path, layers: Sequence[int], count: int) -> list[int]:
    text = list(PROMPT)
    for _ in range(count):
        text.append(int(plain(folder, layers, token_array(text)).argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("kind", DRAFTS)
def test_it_grows_natively_where_its_target_does(llama_folder: Path, kind: str) -> None:
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
) -> None:
    with pytest.raises(ConfigError, match=rf"drafters\.own\.options\.{message}") as raised:
        made(draft_engine(llama_folder), kind, **options)
    assert raised.value.param.startswith("drafters.own.options.")


def test_layers_of_a_target_on_several_ranks_are_refused(llama_folder: Path) -> None:
    engine = draft_engine(llama_folder)
    engine.config = replace(engine.config, tensor_parallel=2)
    with pytest.raises(ConfigError, match="several ranks cannot draft"):
        made(engine, "early_exit", exit_layer=1)
