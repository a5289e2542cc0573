"""Every attention backend computes what a loop over rows and their visible keys computes."""

import math

import pytest
import torch

from cluster.core import EMPTY_TREE
from cluster.engine.attention.backends import create_backend
from cluster.engine.cpu.kernels import load as load_kernels
from cluster.engine.schedule.batch import Share
from tests.support.choices import pairwise
from tests.support.engine.triton_cases import Case, lay_out, tree_of_size
from tests.support.errors import config_error

CPU = torch.device("cpu")
OPTIONS = {"plain": {}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": True}}
BATCHES = {
    "one decoding row": lay_out((20, 1, EMPTY_TREE, 0)),
    "a whole prompt": lay_out((0, 40, EMPTY_TREE, 0)),
    "a whole prompt with a tree": lay_out((0, 9, tree_of_size(6), 0)),
    "a later chunk": lay_out((50, 30, EMPTY_TREE, 0)),
    "a drafter's growth": lay_out((11, 0, tree_of_size(9), 5)),
    "a first token with a tree": lay_out((0, 1, tree_of_size(3), 0)),
    "ragged": lay_out(
        (3, 1, tree_of_size(5), 0), (9, 2, EMPTY_TREE, 0), (30, 0, tree_of_size(7), 3)
    ),
    "equal widths": lay_out(
        (3, 1, tree_of_size(4), 0), (9, 1, tree_of_size(4), 0), (200, 1, tree_of_size(4), 0)
    ),
    "short and long": lay_out(
        (3, 1, tree_of_size(5), 0), (5, 90, EMPTY_TREE, 0), (900, 1, tree_of_size(2), 0)
    ),
    "padded": lay_out((5, 1, EMPTY_TREE, 0), min_rows=4),
}


@pairwise(
    backend=["sdpa", "native"],
    kv_heads=[1, 2, 4],
    window=[None, 1, 7, 64],
    option=OPTIONS,
    name=BATCHES,
)
def test_backend_equals_the_naive_loop(
    backend: str, kv_heads: int, window: int | None, option: str, name: str
):
    if backend == "native" and load_kernels() is None:
        pytest.skip("needs a C++ compiler")
    case = Case(BATCHES[name], 4, kv_heads, 32, window=window, **OPTIONS[option])
    found = case.attended(create_backend(backend, CPU))
    assert found.shape == (case.batch.num_rows, case.heads, case.head_dim)
    for share in case.batch.shares:
        own = found[share.row_start : share.row_stop]
        torch.testing.assert_close(own, _naive(case, share), atol=1e-5, rtol=1e-5)
    assert bool(torch.isfinite(found).all())


def _naive(case: Case, share: Share) -> torch.Tensor:
    """[rows, heads, head_dim], one row, head and key at a time."""
    query, kv, options = case.query(), case.kv(), case.options()
    rows = []
    for index in range(share.num_rows):
        slots = share.slots[_visible_keys(share, index, case.window)]
        heads = []
        for head in range(case.heads):
            keys, values = kv[slots, :, head // (case.heads // case.kv_heads)].unbind(1)
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


def test_an_unknown_backend_is_refused_with_those_known():
    with config_error("auto or one of: native, sdpa"):
        create_backend("flash", CPU)
