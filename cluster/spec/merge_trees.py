"""Re-roots, calibrates and merges the trees of a batch's drafters.

Native code does it for all trees of a batch at once.  The loops here give the same results; they
are the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.core import FloatArray, TokenTree
from cluster.records import record
from cluster.spec.forest import Indices, concatenated, join
from cluster.spec.held_trees import HeldTrees, MergedTrees
from cluster.spec.native import trees as native
from cluster.spec.tree import monotone, reroot


def prepare() -> None:
    """Compile the native code now, so that the first `merge_trees` need not."""
    native.is_available()


def merge_trees(held: HeldTrees) -> MergedTrees:
    """Re-root, calibrate and merge the trees of a batch."""
    return native.merge_trees(held) if native.is_available() else merge_trees_one_by_one(held)


def merge_trees_one_by_one(held: HeldTrees) -> MergedTrees:
    """Do `merge_trees` in loops: used without a compiler, and the reference of the native code."""
    left = [_left(held, index) for index in range(len(held.trees))]
    trees, counts = [each.tree for each in left], [len(each.tree) for each in left]
    members: list[list[int]] = [[] for _ in range(held.num_groups)]
    for index, group in enumerate(held.groups):
        if counts[index]:
            members[group].append(index)
    unions = [
        merge(
            [trees[index] for index in indices],
            [left[index].calibrated for index in indices],
            weights_of([held.losses[index] for index in indices]),
        )
        for indices in members
    ]
    merged = join([each.tree for each in unions])
    places = [
        union.places[members[group].index(index)] + merged.starts[group]
        for index, group in enumerate(held.groups)
        if counts[index] and (union := unions[group])
    ]
    return MergedTrees(
        np.array([each.root for each in left], dtype=np.int64),
        join(trees),
        concatenated([each.claimed for each in left]),
        concatenated([each.calibrated for each in left]),
        merged,
        concatenated([each.survival for each in unions]),
        np.concatenate([np.empty(0, dtype=np.int64), *places]),
    )


@record
class MergedTree:
    """The union of several drafters' trees.

    survival: float32[n], not increasing along a path.  places: for each of the trees, the places of
    its nodes in the union, int64.
    """

    tree: TokenTree
    survival: FloatArray
    places: list[Indices]


def merge(
    trees: Sequence[TokenTree],
    survivals: Sequence[FloatArray],
    weights: Sequence[float] | None = None,
) -> MergedTree:
    """The trie union of `trees`, all of which continue the same context.

    weights: of the drafters, above 0, on any scale; None = equal.  Nodes stand in order of first
    mention, so parents stand before children.

    A node's probability given its parent is a weighted mean over the drafters that proposed any
    child of the parent.  The weight is the drafter's own, times its survival of the parent.  Such a
    drafter claims 0 for the children that it did not propose; drafters that proposed no child of
    the parent do not count.  So if all drafters have proposed children of every parent, a survival
    is the weighted mean of the survivals that they claim.
    """
    shares = [1.0 / max(len(trees), 1)] * len(trees) if weights is None else weights
    edges: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    claimed: list[float] = []
    reached: dict[int, float] = {}  # by parent: weights of those who proposed children
    places: list[Indices] = []
    for tree, values, share in zip(trees, survivals, shares, strict=True):
        bounded = monotone(tree.parents, values).tolist()
        above, own = tree.parents.tolist(), np.empty(len(tree), dtype=np.int64)
        for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), above, strict=True)):
            place = -1 if parent < 0 else int(own[parent])
            merged = edges.setdefault((place, token), len(tokens))
            if merged == len(tokens):
                tokens.append(token)
                parents.append(place)
                claimed.append(0.0)
            own[node] = merged
            claimed[merged] += share * bounded[node]
        for parent in sorted(set(above)):
            place, value = (-1, 1.0) if parent < 0 else (int(own[parent]), bounded[parent])
            reached[place] = reached.get(place, 0.0) + share * value
        places.append(own)
    return MergedTree(TokenTree.of(tokens, parents), _survivals(parents, claimed, reached), places)


def _survivals(
    parents: Sequence[int], claimed: Sequence[float], reached: dict[int, float]
) -> FloatArray:
    found: list[float] = []
    for parent, claims in zip(parents, claimed, strict=True):
        above = reached[parent]
        share = min(claims / above, 1.0) if above > 0.0 else 0.0
        found.append(share * (1.0 if parent < 0 else found[parent]))
    return np.array(found, dtype=np.float32)


def weights_of(losses: Sequence[float]) -> list[float] | None:
    """Return each drafter's weight, by its predictions of this text; None without evidence.

    losses: nats per token, NaN = unknown.  exp(-loss) is the geometric mean of the probabilities
    that the drafter gave to the committed tokens.
    """
    if any(map(math.isnan, losses)):
        return None
    best = min(losses, default=0.0)
    weights = [math.exp(best - loss) for loss in losses]
    total = sum(weights)
    return [weight / total for weight in weights]


@record
class _Left:
    """The part of a tree below its new root; root: as in `MergedTrees`."""

    root: int
    tree: TokenTree
    claimed: FloatArray
    calibrated: FloatArray


def _left(held: HeldTrees, index: int) -> _Left:
    tree, committed, known = held.trees[index], held.committed[index], held.calibrated[index]
    rest = reroot(tree, committed, held.claimed[index])
    root = rest.node if rest.hit else -2
    if known is None:
        calibrated = held.calibrators[index].survival(rest.tree.parents, rest.survival)
    else:
        calibrated = reroot(tree, committed, known).survival
    return _Left(root, rest.tree, rest.survival, calibrated)
