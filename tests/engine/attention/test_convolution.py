"""Convolutions and delta layers along the paths of trees: as in a plain forward of each path."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenArray, TokenTree
from cluster.engine.engine import Engine
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.loading.planned import planned
from cluster.engine.memory import pool_sizes
from cluster.engine.schedule.batch import Share
from cluster.engine.work import Work
from cluster.errors import ConfigError
from cluster.spec.tree import ancestor_mask
from tests.support.choices import by_day
from tests.support.engine.adapters import check_adapter, write_adapter
from tests.support.engine.driver import (
    PAGE_SIZE,
    Factory,
    GreedyDecoder,
    alike_prompts,
    check_crowd,
    generate_all,
    load_engine,
    load_oracle,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.native import needs_native
from tests.support.engine.tiny import tiny
from tests.support.engine.triton_cases import lay_out

NUM_TOKENS = 12
LENGTHS = (2, 9, 22, 37, 50)
FEW = ["lfm2", "qwen3.5"]


@pytest.fixture(scope="module", params=by_day(FEW, [*FEW, "qwen3-next"]))
def folder(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Path:
    return checkpoint_factory(request.param)


@pytest.fixture(scope="module")
def prompts() -> dict[str, TokenArray]:
    """Forty, by night a hundred; those of one length part ways in their last token alone."""
    return alike_prompts(LENGTHS, by_day(range(10, 18), range(10, 30)))


@pytest.fixture(scope="module")
def texts_of(prompts: dict[str, TokenArray]) -> Callable[[Path], dict[str, list[int]]]:
    """transformers' own greedy ones, of a model."""
    return lru_cache(lambda folder: generate_all(load_oracle(folder), prompts, NUM_TOKENS))


@pytest.fixture(scope="module")
def texts(texts_of: Callable[[Path], dict[str, list[int]]], folder: Path) -> dict[str, list[int]]:
    return texts_of(folder)


def test_greedy_text_of_many_prompts_equals_transformers(
    folder: Path, prompts: dict[str, TokenArray], texts: dict[str, list[int]]
):
    check_crowd(folder, texts, prompts)


def test_where_places_of_states_are_few_texts_take_turns(
    checkpoint_factory: Factory,
    texts_of: Callable[[Path], dict[str, list[int]]],
    prompts: dict[str, TokenArray],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pool_sizes, "wanted_states", lambda config, layers: 5)
    folder = checkpoint_factory("qwen3.5")
    own = {name: ids for name, ids in prompts.items() if name.endswith(("-10", "-11"))}
    decoder = GreedyDecoder(
        load_engine(folder), own, NUM_TOKENS, np.random.default_rng(4), texts_of(folder)
    )
    assert decoder.run() == {name: texts_of(folder)[name] for name in own}
    assert decoder.counts["preempted"]


def test_states_of_another_path_are_found_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch):
    right = Share.path_slots
    # From one token further back.
    monkeypatch.setattr(
        Share, "path_slots", lambda share, length: np.roll(right(share, length), 1, axis=1)
    )
    with pytest.raises(ConfigError, match="logits are off by"):
        load_engine(folder)


@given(st.data())
def test_a_row_reads_the_last_tokens_of_its_path(data: st.DataObject):
    """Found by walking from parent to parent."""
    num_delta, start = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    length, num_nodes = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 7))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    num_cached = data.draw(st.integers(0, num_nodes)) if not num_delta else 0
    context_len = start + num_delta
    tree = TokenTree.of(range(num_nodes), parents)
    (share,) = lay_out((start, num_delta, tree, num_cached)).shares

    def path(key: int) -> list[int]:
        if key < 0:
            return []
        parent = key - 1 if key < context_len else parents[key - context_len]
        is_node = key >= context_len and parent >= 0
        above = path(context_len + parent if is_node else min(key, context_len) - 1)
        return [*above, int(share.slots[key])]

    keys = [*range(start, context_len), *range(context_len + num_cached, context_len + num_nodes)]
    expected = [([-1] * length + path(key))[-length:] for key in keys]
    assert share.path_slots(length).tolist() == expected


def test_a_text_keeps_the_last_pages_of_its_convolutions_alone(folder: Path):
    engine = load_engine(folder)
    run(engine, Work("a", 0, prompt(120)))
    attending, convolving = engine.page_owners.sequences["a"].tables
    assert len(attending.held_pages) == 120 // PAGE_SIZE
    assert len(convolving.held_pages) <= 3
    # Of states its last, beside that of no token.
    assert engine.page_owners.states.pool.num_held == (2 if engine.cache.states else 0)


def test_adapters_of_convolutions_are_added(folder: Path, tmp_path: Path):
    names = ("in_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_a", "out_proj", "w1", "q_proj")
    check_adapter(folder, write_adapter(folder, tmp_path / "a", names))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_to_the_bit_beside_any_others(
    dtype: torch.dtype, checkpoint_factory: Factory
):
    sizes = {"hidden_size": 64, "num_key_value_heads": 2, "init_std": 0.1, "dtype": dtype}
    engine = load_engine(checkpoint_factory("lfm2", **sizes), dtype="auto", reproducible=True)
    tree = random_tree(7, np.random.default_rng(4))
    mask = ancestor_mask(tree.parents)
    drafted = rows(run(engine, Work("tree", 0, prompt(30), tree))).clone()
    for node, path in enumerate(mask):
        text = np.concatenate((prompt(30), tree.token_ids[path]))
        alone = rows(run(engine, Work("alone", 0, text)))
        assert torch.equal(alone[0], drafted[1 + node])


def test_its_memory_is_planned(folder: Path):
    config = tiny(folder, {"page_size": PAGE_SIZE})
    engine = Engine.load(config)
    found = planned(folder, check_loadable(folder, config, is_here=True), config, is_here=True)
    scratch = sum(group.bytes_per_page() for group in engine.cache.groups)
    assert found.kv_cache + found.states == engine.cache.num_bytes - scratch
    assert bool(found.states) == bool(engine.cache.states)
    (attending,) = (layer for layer in engine.layers if not layer.is_convolution)
    assert found.kv_per_token == 2 * attending.num_kv_heads * attending.head_dim * 4
