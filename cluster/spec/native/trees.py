"""Native versions of functions of `cluster.spec.{merge_trees,tree_check,acceptance}`.

The C++ sources beside this file document them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster import cpp
from cluster.core import FloatArray, TokenTree
from cluster.spec.forest import Forest
from cluster.spec.held_trees import HeldTrees, KnownTrees, MergedTrees
from cluster.spec.survival import NUM_BINS, NUM_FORECAST_BINS

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class _Held(ctypes.Structure):
    """trees.h's Held."""

    _fields_ = (
        *((name, _INT64) for name in ("num_trees", "num_groups", "num_knots")),
        *((name, _POINTER) for name in ("counts", "committed_counts", "groups", "curves")),
        *((name, _POINTER) for name in ("tokens", "parents", "committed")),
        *((name, _POINTER) for name in ("claimed", "calibrated", "losses", "fits")),
    )


class _Merged(ctypes.Structure):
    """trees.h's Merged."""

    _fields_ = (
        *((name, _POINTER) for name in ("roots", "starts", "parents", "owners", "places")),
        *((name, _POINTER) for name in ("tokens", "claimed", "calibrated")),
        *((name, _POINTER) for name in ("merged_starts", "merged_parents", "merged_owners")),
        *((name, _POINTER) for name in ("merged_tokens", "merged_survival")),
    )


class _Checked(ctypes.Structure):
    """trees.h's Checked."""

    _fields_ = (
        *((name, _INT64) for name in ("num_trees", "num_ids")),
        *((name, _POINTER) for name in ("counts", "tokens", "parents", "survivals")),
        *((name, ctypes.c_double) for name in ("max_survival", "growth_factor", "growth")),
    )


class _Scored(ctypes.Structure):
    """trees.h's Scored."""

    _fields_ = (
        *((name, _INT64) for name in ("num_trees", "num_lengths", "num_bins")),
        *((name, _INT64) for name in ("num_forecast_bins", "num_knots", "few")),
        *((name, _POINTER) for name in ("counts", "followed_counts", "base_lens", "scores")),
        *((name, _POINTER) for name in ("lengths", "tokens", "parents", "followed", "claimed")),
        *((name, _POINTER) for name in ("next_steps", "sums", "calibrators", "fits", "accepted")),
        *((name, ctypes.c_double) for name in ("tree_decay", "node_decay")),
    )


class _Columns:
    """Arrays of one dtype, side by side in one block of memory: one allocation, one address."""

    def __init__(self, dtype: npt.DTypeLike, lengths: Sequence[int]) -> None:
        block = np.empty(sum(lengths), dtype=dtype)
        address, size = block.ctypes.data, block.itemsize
        self.arrays: list[npt.NDArray[Any]] = []
        self.addresses: list[int] = []
        start = 0
        for length in lengths:
            self.arrays.append(block[start : start + length])
            self.addresses.append(address + start * size)
            start += length


def _flat(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Join the arrays end to end, with the dtype that the native code assumes."""
    if not arrays:
        return np.empty(0, dtype=dtype)
    return np.concatenate(arrays, dtype=dtype, casting="same_kind")


@cache
def _library() -> ctypes.CDLL | None:
    structures = {"Held": _Held, "Merged": _Merged, "Checked": _Checked, "Scored": _Scored}
    native = cpp.load(Path(__file__).parent, structures)
    if native is None:
        return None
    native.library.merge_trees.argtypes = [_POINTER, _POINTER]
    native.library.merge_trees.restype = None
    native.library.score_trees.argtypes = [_POINTER]
    native.library.score_trees.restype = None
    native.library.are_sound.argtypes = [_POINTER]
    native.library.are_sound.restype = _INT64
    return native.library


def is_available() -> bool:
    """True if the other functions can be called; the first call may compile the library."""
    return _library() is not None


def are_sound(
    trees: Sequence[TokenTree],
    survivals: Sequence[FloatArray] | None,
    num_ids: int,
    bounds: tuple[float, float, float],
) -> bool:
    """See `cluster.spec.tree_check.are_sound`; the arrays fit each other.

    bounds: its MAX_SURVIVAL, GROWTH_FACTOR and GROWTH.
    """
    library = _library()
    assert library is not None, "ask is_available first"
    counts = np.array([len(tree.token_ids) for tree in trees], dtype=np.int64)
    tokens = _flat([tree.token_ids for tree in trees], np.int32)
    parents = _flat([tree.parents for tree in trees], np.int32)
    claimed = None if survivals is None else _flat(survivals, np.float32)
    given = _Checked(
        len(trees),
        num_ids,
        counts.ctypes.data,
        tokens.ctypes.data,
        parents.ctypes.data,
        None if claimed is None else claimed.ctypes.data,
        *bounds,
    )
    return bool(library.are_sound(ctypes.byref(given)))


def merge_trees(held: HeldTrees) -> MergedTrees:
    """See `cluster.spec.merge_trees.merge_trees`."""
    library = _library()
    assert library is not None, "ask is_available first"
    trees, num_trees, num_groups = held.trees, len(held.trees), held.num_groups
    counts = [len(tree.token_ids) for tree in trees]
    num_nodes = sum(counts)
    tokens = _flat([tree.token_ids for tree in trees], np.int32)
    parents = _flat([tree.parents for tree in trees], np.int32)
    committed = _flat(held.committed, np.int32)
    claimed = _flat(held.claimed, np.float32)
    known = [
        claims if values is None else values
        for claims, values in zip(held.claimed, held.calibrated, strict=True)
    ]
    calibrated = _flat(known, np.float32)
    curve_of = {id(each): place for place, each in enumerate(held.distinct_calibrators())}
    fits = [each.curve for each in held.distinct_calibrators()]
    fit = np.concatenate(fits) if fits else np.zeros(2)
    numbers = np.array(
        [
            counts,
            [len(tokens) for tokens in held.committed],
            held.groups,
            [
                curve_of[id(calibrator)] if values is None else -1
                for calibrator, values in zip(held.calibrators, held.calibrated, strict=True)
            ],
        ],
        dtype=np.int64,
    ).reshape(4, num_trees)
    losses = np.array(held.losses, dtype=np.float64)
    rows = numbers.ctypes.data
    given = _Held(
        num_trees,
        num_groups,
        (len(fits[0]) - 2) // 2 if fits else 0,
        *(rows + 8 * num_trees * place for place in range(4)),
        tokens.ctypes.data,
        parents.ctypes.data,
        committed.ctypes.data,
        claimed.ctypes.data,
        calibrated.ctypes.data,
        losses.ctypes.data,
        fit.ctypes.data,
    )
    ints = _Columns(
        np.int64,
        (num_trees, num_trees + 1, *(3 * (num_nodes,)), num_groups + 1, *(2 * (num_nodes,))),
    )
    words = _Columns(np.int32, (num_nodes, num_nodes))
    floats = _Columns(np.float32, (num_nodes,) * 3)
    at, word, float_at = ints.addresses, words.addresses, floats.addresses
    library.merge_trees(
        ctypes.byref(given),
        ctypes.byref(_Merged(*at[:5], word[0], *float_at[:2], *at[5:8], word[1], float_at[2])),
    )
    roots, starts, left_parents, owners, places, ends, above, groups = ints.arrays
    num_left, num_merged = int(starts[-1]), int(ends[-1])
    left = Forest(words.arrays[0][:num_left], left_parents[:num_left], owners[:num_left], starts)
    merged = Forest(words.arrays[1][:num_merged], above[:num_merged], groups[:num_merged], ends)
    return MergedTrees(
        roots,
        left,
        floats.arrays[0][:num_left],
        floats.arrays[1][:num_left],
        merged,
        floats.arrays[2][:num_merged],
        places[:num_left],
    )


def score_trees(
    known: KnownTrees, lengths: npt.NDArray[np.int64], few: int, tree_decay: float
) -> npt.NDArray[np.int64]:
    """Enter each tree into its two scores, as `Score.enter` does one by one.

    Calibrators are not fitted anew.  lengths, few (an index into them), tree_decay: constants of
    `cluster.spec.acceptance`.  Returns what its `learn_all` does.
    """
    library = _library()
    assert library is not None, "ask is_available first"
    numbers = np.array(
        [
            [len(tree.token_ids) for tree in known.trees],
            [len(followed) for followed in known.followed],
            known.base_lens,
            [0 if steps is None else steps.ctypes.data for steps in known.next_steps],
        ],
        dtype=np.int64,
    )
    scores = np.array(known.scores, dtype=np.int64)
    tokens = _flat([tree.token_ids for tree in known.trees], np.int32)
    parents = _flat([tree.parents for tree in known.trees], np.int32)
    followed = _flat(known.followed, np.int32)
    claimed = _flat(known.claimed, np.float32)
    addresses = np.array(
        [
            [sums.ctypes.data for sums in known.sums],
            [each.sums.ctypes.data for each in known.calibrators],
            [each.curve.ctypes.data for each in known.calibrators],
        ],
        dtype=np.int64,
    )
    rows, row, columns = numbers.ctypes.data, 8 * len(known.trees), addresses.ctypes.data
    first, accepted = known.calibrators[0], np.empty(len(known.trees), dtype=np.int64)
    given = _Scored(
        len(known.trees),
        len(lengths),
        NUM_BINS,
        NUM_FORECAST_BINS,
        (len(first.curve) - 2) // 2,
        few,
        rows,
        rows + row,
        rows + 2 * row,
        scores.ctypes.data,
        lengths.ctypes.data,
        tokens.ctypes.data,
        parents.ctypes.data,
        followed.ctypes.data,
        claimed.ctypes.data,
        rows + 3 * row,
        *(columns + 8 * len(known.sums) * place for place in range(3)),
        accepted.ctypes.data,
        tree_decay,
        first.decay,
    )
    library.score_trees(ctypes.byref(given))
    return accepted
