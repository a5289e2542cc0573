"""What the drafters of a batch offer: their trees re-rooted, calibrated and merged, all at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.core import FloatArray
from cluster.spec.forest import (
    Floats,
    Forest,
    below,
    concatenated,
    conditioned,
    join,
    merge,
    walk,
)
from cluster.spec.held_trees import HeldTrees, United
from cluster.spec.native import union as native


def prepare() -> None:
    """Compile now what the first `unite` would otherwise compile."""
    native.is_available()


def unite(held: HeldTrees) -> United:
    """Re-root, calibrate and merge the trees of a batch."""
    return native.unite(held) if native.is_available() else unite_by_arrays(held)


def unite_by_arrays(held: HeldTrees) -> United:
    """`unite` in array operations; without a compiler, and what the native code is held to."""
    forest = join(held.trees)
    roots = walk(forest, held.committed)
    of_trees = np.where(roots >= 0, roots - forest.starts[:-1], roots)
    claimed = concatenated(held.claimed)
    calibrated = concatenated(
        [claims if values is None else values
         for claims, values in zip(held.claimed, held.calibrated, strict=True)]
    )  # fmt: skip
    if (roots != -1).any():
        kept = below(forest, roots)
        calibrated = conditioned(calibrated, forest, roots, kept)
        claimed = conditioned(claimed, forest, roots, kept)
        forest = forest.keep(kept)
    calibrated = _calibrated(held, forest, claimed, calibrated)
    merged, survival, claims = _merged(held, forest, claimed, calibrated)
    return United(of_trees, forest, claimed, calibrated, merged, survival, claims)


def _calibrated(
    held: HeldTrees, forest: Forest, claimed: FloatArray, calibrated: FloatArray
) -> FloatArray:
    """`calibrated`, with the values of trees that have none yet from their claims."""
    found = calibrated.copy()
    of_tree = [id(each) for each in held.calibrators]
    is_new = np.array([values is None for values in held.calibrated], dtype=np.bool_)
    for calibrator in held.distinct_calibrators():
        is_theirs = is_new & np.array([each == id(calibrator) for each in of_tree])
        nodes = is_theirs[forest.owners]
        if nodes.any():
            found[nodes] = calibrator.survivals(forest.keep(nodes), claimed[nodes])
    return found


def _merged(
    held: HeldTrees, forest: Forest, claimed: FloatArray, calibrated: FloatArray
) -> tuple[Forest, FloatArray, FloatArray]:
    """The trees of each sequence as one: (merged, survival, claims)."""
    counts = np.diff(forest.starts).tolist()
    shares = np.ones(len(held.trees))
    slots = np.zeros(len(held.trees), dtype=np.int64)
    members: list[list[int]] = [[] for _ in range(held.num_groups)]
    for place, group in enumerate(held.groups):
        if counts[place]:
            slots[place] = len(members[group])
            members[group].append(place)
    for places in members:
        if len(places) > 1:
            shares[places] = _shares([held.losses[place] for place in places])
    groups = np.array(held.groups, dtype=np.int64)
    merged = merge(forest, groups, held.num_groups, calibrated, shares)
    width = max([1, *map(len, members)])
    claims: FloatArray = np.full((width, merged.forest.num_nodes), np.nan, dtype=np.float32)
    claims[slots[forest.owners], merged.places] = claimed
    return merged.forest, merged.survival, claims


def _shares(losses: Sequence[float]) -> Floats:
    """Trust in each drafter, by how well it has predicted this text; without evidence, equal.

    exp(-loss) is the geometric mean of the probabilities it gave to the committed tokens.
    """
    if any(map(math.isnan, losses)):
        return np.full(len(losses), 1.0 / len(losses))
    best = min(losses)
    weights = [math.exp(best - loss) for loss in losses]
    return np.array(weights) / sum(weights)
