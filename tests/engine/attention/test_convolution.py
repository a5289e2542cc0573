"""Convolutions and delta layers along the paths of trees: as in a plain forward of each path.

Of delta layers no wrong state is served, none is lost, and the next text finds what was kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenTree
from cluster.engine.attention import seam
from cluster.engine.attention.delta_rule import Piece, delta_rule
from cluster.engine.engine import Engine
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.loading.planned import planned
from cluster.engine.memory import pool_sizes
from cluster.engine.schedule.batch import Share
from cluster.engine.work import Work
from cluster.spec.tree import ancestor_mask
from tests.support.choices import by_day, pairwise
from tests.support.engine.adapters import check_adapter, write_adapter
from tests.support.engine.driver import (
    PAGE_SIZE,
    TREE,
    Factory,
    GreedyDecoder,
    alike_prompts,
    check_crowd,
    check_near,
    check_rows,
    generate_all,
    load_engine,
    load_oracle,
    prompt,
    random_tree,
    rows,
    run,
)
from tests.support.engine.integrity import check_integrity
from tests.support.engine.native import needs_native
from tests.support.engine.tiny import tiny
from tests.support.engine.triton_cases import lay_out
from tests.support.errors import config_error

FEW = ["lfm2", "qwen3.5"]


@pytest.fixture(scope="module", params=by_day(FEW, [*FEW, "qwen3-next"]))
def folder(request: pytest.FixtureRequest, checkpoint_factory: Factory) -> Path:
    return checkpoint_factory(request.param)


def test_greedy_text_of_many_prompts_equals_transformers(folder: Path):
    """Of forty, by night of a hundred."""
    check_crowd(folder, by_day(range(10, 18), range(10, 30)))


def test_where_places_of_states_are_few_texts_take_turns(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_sizes, "wanted_states", lambda config, layers: 5)
    folder, prompts = checkpoint_factory("qwen3.5"), alike_prompts((10, 11))
    texts = generate_all(load_oracle(folder), prompts, 12)
    decoder = GreedyDecoder(load_engine(folder), prompts, 12, np.random.default_rng(4), texts)
    assert decoder.run() == texts
    assert decoder.counts["preempted"]


def test_states_of_another_path_are_found_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch):
    right = Share.path_slots
    # From one token further back.
    monkeypatch.setattr(
        Share, "path_slots", lambda share, length: np.roll(right(share, length), 1, axis=1)
    )
    with config_error("logits are off by"):
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


def _of_no_text(lines: Any, states: Any, pieces: list[Piece], *rows: torch.Tensor) -> torch.Tensor:
    """Each state is taken for that of a text's beginning."""
    for piece in pieces:
        piece.states.zero_()
    return delta_rule(lines, states, pieces, *rows)


def _of_the_border_before(
    lines: Any, states: Any, pieces: list[Piece], *rows: torch.Tensor
) -> torch.Tensor:
    """What is written at a border is what was there before, as where a write is lost."""
    former = states.clone()
    found = delta_rule(lines, states, pieces, *rows)
    states.copy_(former)
    return found


@pairwise(
    architecture=["qwen3.5", "qwen3-next"],
    wrong=[_of_no_text, _of_the_border_before],
    page_size=[PAGE_SIZE, 16],
)
def test_wrong_states_of_delta_layers_are_found_at_load(
    architecture: str,
    wrong: Callable[..., torch.Tensor],
    page_size: int,
    checkpoint_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(seam, "delta_rule", wrong)
    with config_error("logits are off by"):
        load_engine(checkpoint_factory(architecture), page_size=page_size)


def test_a_failed_step_leaves_no_state_behind(
    checkpoint_factory: Factory, monkeypatch: pytest.MonkeyPatch
):
    """A smaller one follows, which reaches no border."""
    folder = checkpoint_factory("qwen3.5")
    engine, oracle, text = load_engine(folder), load_oracle(folder), prompt(30)
    run(engine, Work("a", 0, text[:6]))

    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as failing:
        failing.setattr(seam, "delta_rule", fail)
        engine.submit(Work("a", 6, text[6:20]))
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    check_integrity(engine)
    sequence = engine.page_owners.sequences["a"]
    assert sequence.border == 4
    assert sequence.spare
    engine.step(prompt_rows=1)
    assert sequence.border == 4
    while engine.has_pending:
        engine.step()
    check_rows(run(engine, Work("a", 20, text[20:], TREE)), oracle, text, TREE)


def test_who_shares_half_of_a_prompt_keeps_its_state_for_the_next(
    checkpoint_factory: Factory,
):
    folder = checkpoint_factory("qwen3.5")
    engine, oracle = load_engine(folder, max_batch_tokens=256), load_oracle(folder)
    hits = []
    for name in "abc":
        text = np.concatenate((prompt(150), prompt(90, seed=ord(name))))
        engine.submit(Work(name, 0, text, TREE))
        found, hit = [], 0
        while engine.has_pending:
            found += engine.step()
            hit += engine.last_step.num_prefix_hit_tokens
        hits.append(hit)
        # transformers cuts such a text elsewhere: 2.6e-5 was seen.
        check_rows(found[-1], oracle, text, TREE, bound=5e-5)
    assert hits == [0, 0, 148]


def test_narrow_formats_keep_states_in_float32(checkpoint_factory: Factory):
    folder = checkpoint_factory("qwen3.5", init_std=0.05)
    narrow = load_engine(folder, dtype="bfloat16", attention="sdpa")
    check_near(narrow, load_engine(folder))
    assert {each.dtype for each in narrow.cache.states.values()} == {torch.float32}


def test_what_its_rows_compute_together_is_not_reproducible(checkpoint_factory: Factory):
    with config_error("compute a text's rows together"):
        load_engine(checkpoint_factory("qwen3.5"), reproducible=True)
