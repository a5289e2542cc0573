"""Re-roots, calibrates and merges the trees of a batch's drafters.

Native code does it for all trees of a batch at once.  The loops here give the same results; they
are the reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cluster.core import token_array
from cluster.spec.forest import Forest, concatenated, join
from cluster.spec.held_trees import Held, MergedTrees
from cluster.spec.native import trees as native
from cluster.spec.tree import monotone, reroot


def merge_trees(trees: Sequence[Held], num_groups: int) -> MergedTrees:
    """Re-root, calibrate and merge the trees of a batch; those of a sequence stand side by side,
    in the order of its number, which is below num_groups."""
    merge = native.merge_trees if native.is_available() else merge_trees_in_loops
    return merge(trees, num_groups)


def merge_trees_in_loops(trees: Sequence[Held], num_groups: int) -> MergedTrees:
    """Do `merge_trees` without a compiler.

    Nodes of a union stand in order of first mention, so parents stand before children.  A node's
    probability given its parent is a weighted mean over the drafters that proposed any child of the
    parent.  The weight is the drafter's own, times its survival of the parent.  Such a drafter
    claims 0 for the children that it did not propose; drafters that proposed no child of the parent
    do not count.  So if all drafters have proposed children of every parent, a survival is the
    weighted mean of the survivals that they claim.
    """
    rests = [reroot(held.tree, held.committed, held.claimed) for held in trees]
    calibrated = [
        held.calibrator.survival(rest.tree.parents, rest.survival)
        if held.calibrated is None
        else reroot(held.tree, held.committed, held.calibrated).survival
        for held, rest in zip(trees, rests, strict=True)
    ]
    # Nodes of the unions by parent and token; the context of group g counts as parent -1 - g.
    edges: dict[tuple[int, int], int] = {}
    parents: list[int] = []
    claims: list[float] = []
    owners: list[int] = []
    reached: defaultdict[int, float] = defaultdict(float)  # weights of those who proposed children
    places: list[int] = []
    for held, rest, values in zip(trees, rests, calibrated, strict=True):
        bounded = monotone(rest.tree.parents, values).tolist()
        above, own = rest.tree.parents.tolist(), list[int]()
        for token, parent, value in zip(rest.tree.token_ids.tolist(), above, bounded, strict=True):
            key = own[parent] if parent >= 0 else -1 - held.group, token
            place = edges.setdefault(key, len(edges))
            if place == len(parents):
                parents.append(key[0])
                claims.append(0.0)
                owners.append(held.group)
            own.append(place)
            claims[place] += held.weight * value
        for parent in set(above):
            place, value = (own[parent], bounded[parent]) if parent >= 0 else (-1 - held.group, 1.0)
            reached[place] += held.weight * value
        places += own
    survival: list[float] = []
    for parent, claimed in zip(parents, claims, strict=True):
        share = min(claimed / reached[parent], 1.0) if reached[parent] > 0.0 else 0.0
        survival.append(share * (survival[parent] if parent >= 0 else 1.0))
    return MergedTrees(
        np.array([each.node for each in rests], dtype=np.int64),
        join([each.tree for each in rests]),
        concatenated([each.survival for each in rests]),
        concatenated(calibrated),
        Forest(
            token_array([token for _, token in edges]),
            np.maximum(np.array(parents, dtype=np.int64), -1),
            np.array(owners, dtype=np.int64),
            np.searchsorted(owners, np.arange(num_groups + 1)),
        ),
        np.array(survival, dtype=np.float32),
        np.array(places, dtype=np.int64),
    )
