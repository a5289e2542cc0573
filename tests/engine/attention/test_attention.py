"""Every attention backend computes what a loop over rows and their visible keys computes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cluster.core import EMPTY_TREE, TokenTree, token_array
from cluster.engine.attention.backends import create_backend
from cluster.engine.cpu import kernels
from cluster.engine.memory.sequence import Pending, Sequence
from cluster.engine.schedule.batch import Batch, Pick, Share, build_batch
from cluster.engine.types import AttentionOptions
from cluster.engine.work import Work
from cluster.errors import ConfigError
from tests.support.engine.driver import random_tree

NUM_SLOTS, HEADS, HEAD_DIM = 4096, 4, 32
BACKENDS = [
    "sdpa",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(kernels.load() is None, reason="needs a C++ compiler"),
    ),
]
PLAIN = AttentionOptions(scaling=0.2)
OPTIONS = {
    "plain": PLAIN,
    "softcap": replace(PLAIN, softcap=3.0),
    "sinks": replace(PLAIN, sinks=torch.linspace(-1, 1, HEADS)),
}


def _batch(*specs: tuple[int, int, TokenTree, int], min_rows: int = 0) -> Batch:
    """specs: cached tokens, new tokens, tree, cached nodes; pages are scattered at random."""
    generator = np.random.default_rng(3)
    pages = iter(generator.permutation(NUM_SLOTS // 16 - 1).tolist())
    picks = []
    for index, (cached, new, tree, num_cached_nodes) in enumerate(specs):
        sequence = Sequence(str(index), index, 16)
        while sequence.num_pages * 16 < cached + new + len(tree):
            sequence.tables[0].add(next(pages))
        sequence.append(token_array([7] * cached))
        work = Work(str(index), cached, token_array([7] * new), tree, num_cached_nodes)
        sequence.pending = Pending(work)
        picks.append(Pick(sequence, work, new, completes=True))
    return build_batch(picks, min_rows=min_rows, scratch_slot=NUM_SLOTS - 16, max_context_len=2048)


def _tree(size: int) -> TokenTree:
    return random_tree(size, np.random.default_rng(size))


BATCHES = {
    "one decoding row": _batch((20, 1, EMPTY_TREE, 0)),
    "a whole prompt": _batch((0, 40, EMPTY_TREE, 0)),
    "a whole prompt with a tree": _batch((0, 9, _tree(6), 0)),
    "a later chunk": _batch((50, 30, EMPTY_TREE, 0)),
    "a drafter's growth": _batch((11, 0, _tree(9), 5)),
    "a first token with a tree": _batch((0, 1, _tree(3), 0)),
    "ragged": _batch((3, 1, _tree(5), 0), (9, 2, EMPTY_TREE, 0), (30, 0, _tree(7), 3)),
    "equal widths": _batch((3, 1, _tree(4), 0), (9, 1, _tree(4), 0), (200, 1, _tree(4), 0)),
    "short and long": _batch((3, 1, _tree(5), 0), (5, 90, EMPTY_TREE, 0), (900, 1, _tree(2), 0)),
    "padded": _batch((5, 1, EMPTY_TREE, 0), min_rows=4),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", BATCHES)
def test_backend_equals_the_naive_loop(
    backend: str, kv_heads: int, window: int | None, option: str, name: str
) -> None:
    batch, options = BATCHES[name], OPTIONS[option]
    generator = torch.Generator().manual_seed(5)
    query = torch.randn((HEADS, batch.num_rows, HEAD_DIM), generator=generator)
    kv = torch.randn((NUM_SLOTS, 2, kv_heads, HEAD_DIM), generator=generator)
    plan = create_backend(backend).plan(batch, NUM_SLOTS - 16)
    found = plan.attend(query, kv, window, options)
    assert found.shape == (batch.num_rows, HEADS, HEAD_DIM)
    for share in batch.shares:
        expected = _naive(query, kv, share, window, options)
        own = found[share.row_start : share.row_stop]
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    assert bool(torch.isfinite(found).all())


def _naive(
    query: torch.Tensor,
    kv: torch.Tensor,
    share: Share,
    window: int | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """[rows, heads, head_dim], one row, head and key at a time."""
    rows = []
    for index in range(share.num_rows):
        visible = _visible_keys(share, index, window)
        heads = []
        for head in range(HEADS):
            slots = torch.tensor([int(share.slots[key]) for key in visible])
            keys, values = kv[slots, :, head // (HEADS // kv.shape[2])].unbind(1)
            scores = keys @ query[head, share.row_start + index] * options.scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            weights = scores.exp()
            sink = 0.0 if options.sinks is None else math.exp(float(options.sinks[head]))
            heads.append((weights / (weights.sum() + sink)) @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def _visible_keys(share: Share, row: int, window: int | None) -> list[int]:
    """Key indices, from first principles: the context before the row, its ancestors, itself."""
    position = int(share.positions[row])
    keys = [key for key in range(share.context_len) if key <= position]
    if row >= share.num_delta:
        mask = share.node_mask[row - share.num_delta]
        keys += [share.context_len + node for node in range(len(mask)) if mask[node]]
    positions = [*range(share.context_len), *share.node_positions.tolist()]
    return [key for key in keys if window is None or position - positions[key] < window]


def test_new_rows_take_the_slots_behind_the_context() -> None:
    batch = BATCHES["a drafter's growth"]
    (share,) = batch.shares
    assert batch.slots.tolist() == share.slots[16:20].tolist()
    assert share.node_positions.min() == 11
    assert batch.positions.tolist() == share.node_positions[5:].tolist()
    assert len(batch.logit_rows) == 4


def test_padding_rows_write_to_scratch_and_ask_for_no_logits() -> None:
    batch = BATCHES["padded"]
    assert batch.slots[1:].tolist() == [NUM_SLOTS - 16] * 3
    assert batch.logit_rows.tolist() == [0]


def test_an_unknown_backend_is_refused_with_those_known() -> None:
    with pytest.raises(ConfigError, match="auto or one of: native, sdpa"):
        create_backend("flash")
