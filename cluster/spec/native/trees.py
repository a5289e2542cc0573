"""What is done to all trees of a batch at once, by the C++ beside this file: to those that drafters
have sent, to their merge, and to their fates."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.cpp import NativeFunctions
from cluster.records import record
from cluster.spec.step_profile import DRAFT_LENGTHS
from cluster.spec.survival import NODE_DECAY, NUM_BINS, NUM_EQUAL_BINS, Calibrator
from cluster.spec.tree import Forest, Indices, depths


@record
class Held:
    """The tree of one drafter for one sequence of a batch.

    group: the number of its sequence.  claimed: its survivals, float32[n].  calibrated: the
    survivals after calibration; None = not yet done, and `calibrator` will do it.  committed: the
    tokens that were committed since the tree was proposed, int32.  weight: of its drafter on the
    sequence's text, above 0, on any scale.
    """

    group: int
    tree: TokenTree
    claimed: FloatArray
    calibrated: FloatArray | None
    calibrator: Calibrator
    committed: TokenArray
    weight: float = 1.0


@record
class Seen:
    """A tree that was held for a text of base_len tokens, re-rooted there.

    claimed: float32[n], survivals as the drafter claims them.
    """

    drafter: str
    group: tuple[str, bool]
    base_len: int
    tree: TokenTree
    claimed: FloatArray

    @property
    def depth(self) -> int:
        """Of its deepest node."""
        return int(depths(self.tree.parents).max(initial=0))


@record
class Fate:
    """A tree and the text after it.

    followed: the committed tokens after its root.  If the tree is deeper than that, the outcome of
    the nodes beyond them is unknown, and they do not count.  next_steps: int64[DRAFT_LENGTHS], the
    text's length at which the next step would begin if every step verified so many nodes of this
    drafter; `learn` updates it in place.
    """

    seen: Seen
    followed: TokenArray
    next_steps: Indices


@record
class MergedTrees:
    """The result of re-rooting, calibrating and merging trees.

    roots: int64[trees], the node of each tree that is now the last committed token; -1 = the root
    has not moved, -2 = the text has left the tree.  left: the trees below their new roots.
    claimed, calibrated: float32[n], the survivals of the nodes in `left`, given that the root was
    reached.  merged: the union of each sequence's trees.  survival: float32[m], not increasing
    along a path.  places: int64[n], the place in the union of each node in `left`.
    """

    roots: Indices
    left: Forest
    claimed: FloatArray
    calibrated: FloatArray
    merged: Forest
    survival: FloatArray
    places: Indices


_functions = NativeFunctions(
    Path(__file__).parent,
    {
        "are_sound": (ctypes.c_int64, ctypes.c_void_p),
        "merge_trees": (None, ctypes.c_void_p, ctypes.c_void_p),
        "score_trees": (None, ctypes.c_void_p),
    },
)
is_available = _functions.are_here


def _call(name: str, *structures: Sequence[Any]) -> Any:
    """Call a function with structures of trees.h, each given by its fields in their order; the
    result is of use where there is one."""
    return _functions[name](*map(_packed, structures))


def _packed(fields: Sequence[Any]) -> bytes:
    """A structure, whose fields are words of 8 bytes: numbers, and of arrays their addresses."""
    words = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in fields]
    kinds = ["d" if isinstance(each, float) else "q" for each in words]
    return struct.pack("".join(kinds), *words)


def _flat(arrays: Iterable[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Join the arrays end to end, with the dtype that the native code assumes."""
    return np.concatenate((np.empty(0, dtype), *arrays), dtype=dtype, casting="same_kind")


def _integers(values: Iterable[int]) -> Indices:
    return np.array([*values], dtype=np.int64)


def _columns(trees: Sequence[TokenTree]) -> tuple[npt.NDArray[Any], ...]:
    """Return the sizes of the trees, int64, and their tokens and parents end to end, int32."""
    return (
        _integers(len(tree.token_ids) for tree in trees),
        _flat((tree.token_ids for tree in trees), np.int32),
        _flat((tree.parents for tree in trees), np.int32),
    )


def are_sound(
    trees: Sequence[TokenTree],
    survivals: Sequence[FloatArray],
    num_ids: int,
    bounds: tuple[float, float, float],
) -> bool:
    """See `cluster.spec.tree_check.are_sound`; the arrays fit each other.

    bounds: the greatest survival, and by what factor and by how much one may exceed its parent.
    """
    given = (
        len(trees),
        num_ids,
        *_columns(trees),
        _flat(survivals, np.float32),
        *bounds,
    )
    return bool(_call("are_sound", given))


def merge_trees(trees: Sequence[Held], num_groups: int) -> MergedTrees:
    """Re-root, calibrate and merge the trees of a batch's drafters; those of a sequence stand side
    by side, in the order of its number, which is below num_groups.

    Nodes of a union stand in order of first mention, so parents stand before children.  A node's
    probability given its parent is a weighted mean over the drafters that proposed any child of the
    parent.  The weight is the drafter's own, times its survival of the parent.  Such a drafter
    claims 0 for the children that it did not propose; drafters that proposed no child of the parent
    do not count.  So if all drafters have proposed children of every parent, a survival is the
    weighted mean of the survivals that they claim.
    """
    counts, own_tokens, own_parents = _columns([held.tree for held in trees])
    num_nodes = len(own_tokens)
    known = [held.claimed if held.calibrated is None else held.calibrated for held in trees]
    given = (
        len(trees),
        num_groups,
        NUM_BINS,
        counts,
        _integers(len(held.committed) for held in trees),
        _integers(held.group for held in trees),
        _integers(held.calibrator.curve_at if held.calibrated is None else 0 for held in trees),
        own_tokens,
        own_parents,
        _flat((held.committed for held in trees), np.int32),
        _flat((held.claimed for held in trees), np.float32),
        _flat(known, np.float32),
        np.array([held.weight for held in trees], dtype=np.float64),
    )
    roots, starts = np.empty(len(trees), np.int64), np.empty(len(trees) + 1, np.int64)
    ends = np.empty(num_groups + 1, np.int64)
    parents, owners, places, above, groups = np.empty((5, num_nodes), np.int64)
    tokens, merged_tokens = np.empty((2, num_nodes), np.int32)
    claimed, calibrated, survival = np.empty((3, num_nodes), np.float32)
    found = (roots, starts, parents, owners, places, tokens, claimed, calibrated)
    merged = (ends, above, groups, merged_tokens, survival)
    _call("merge_trees", given, (*found, *merged))
    left, union = slice(int(starts[-1])), slice(int(ends[-1]))
    return MergedTrees(
        roots,
        Forest(tokens[left], parents[left], owners[left], starts),
        claimed[left],
        calibrated[left],
        Forest(merged_tokens[union], above[union], groups[union], ends),
        survival[union],
        places[left],
    )


def score_trees(
    fates: Sequence[Fate],
    scores: Sequence[Sequence[int]],
    few: int,
    tree_decay: float,
) -> list[int]:
    """Enter each tree into its two scores.

    Calibrators are not fitted anew.  scores: `Score.addresses` of the first tree's two, of the
    second one's and so on.  few (an index of DRAFT_LENGTHS), tree_decay: constants of
    `cluster.spec.acceptance`.  Returns what its `learn` does.
    """
    seen = [fate.seen for fate in fates]
    counts, tokens, parents = _columns([each.tree for each in seen])
    accepted = np.empty(len(fates), dtype=np.int64)
    given = (
        len(fates),
        len(DRAFT_LENGTHS),
        NUM_BINS,
        NUM_EQUAL_BINS,
        NUM_BINS,
        few,
        counts,
        _integers(len(fate.followed) for fate in fates),
        _integers(each.base_len for each in seen),
        DRAFT_LENGTHS,
        tokens,
        parents,
        _flat((fate.followed for fate in fates), np.int32),
        _flat((each.claimed for each in seen), np.float32),
        _integers(fate.next_steps.ctypes.data for fate in fates),
        np.array(scores, dtype=np.int64),
        accepted,
        tree_decay,
        NODE_DECAY,
    )
    _call("score_trees", given)
    return accepted.tolist()
