"""What native code does with trees, in loops: the reference that it is held to."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, FloatArray, TokenArray, token_array
from cluster.spec.acceptance import JUDGED_RANK, TREE_DECAY, AcceptanceModel, Score
from cluster.spec.native.trees import Fate, Held, MergedTrees
from cluster.spec.step_profile import DRAFT_LENGTHS
from cluster.spec.survival import (
    MAX_LOGIT,
    NODE_DECAY,
    NUM_BINS,
    NUM_EQUAL_BINS,
    Calibrator,
    claimed_conditionals,
    logit,
    sigmoid,
)
from cluster.spec.tree import Floats, Forest, Indices, join, monotone, reroot, walk


def merge_trees(trees: Sequence[Held], num_groups: int) -> MergedTrees:
    """Nodes of a union stand in order of first mention, so parents stand before children."""
    rests = [reroot(held.tree, held.committed, held.claimed) for held in trees]
    calibrated = [
        survival(held.calibrator, rest.tree.parents, rest.survival)
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
    found: list[float] = []
    for parent, claimed in zip(parents, claims, strict=True):
        share = min(claimed / reached[parent], 1.0) if reached[parent] > 0.0 else 0.0
        found.append(share * (found[parent] if parent >= 0 else 1.0))
    return MergedTrees(
        np.array([each.node for each in rests], np.int64),
        join([each.tree for each in rests]),
        np.concatenate((EMPTY_FLOATS, *(each.survival for each in rests))),
        np.concatenate((EMPTY_FLOATS, *calibrated)),
        Forest(
            token_array([token for _, token in edges]),
            np.maximum(np.array(parents, np.int64), -1),
            np.array(owners, np.int64),
            np.searchsorted(owners, np.arange(num_groups + 1)),
        ),
        np.array(found, np.float32),
        np.array(places, np.int64),
    )


def calibrated(calibrator: Calibrator, claimed: npt.ArrayLike) -> Floats:
    """Calibrated conditional probabilities, float64 of the same shape; increasing in them."""
    logits = logit(claimed)
    slope, offset = calibrator.curve[:2].tolist()
    knots, shifts = calibrator.curve[2:].reshape(2, NUM_BINS)
    return sigmoid(slope * logits + offset + np.interp(logits, knots, shifts))


def survival(calibrator: Calibrator, parents: TokenArray, claimed: FloatArray) -> FloatArray:
    """A drafter's survivals, calibrated: float32[n], not increasing along a path.

    Conditionals are scaled down where the sum of siblings exceeds 1: at most one of them is drawn.
    """
    conditionals = calibrated(calibrator, claimed_conditionals(parents, claimed)).tolist()
    totals: defaultdict[int, float] = defaultdict(float)
    for parent, value in zip(parents.tolist(), conditionals, strict=True):
        totals[parent] += value
    found: list[float] = []
    for parent, value in zip(parents.tolist(), conditionals, strict=True):
        share = value / max(totals[parent], 1.0)
        found.append(share if parent < 0 else found[parent] * share)
    return np.array(found, np.float32)


def observe(calibrator: Calibrator, claimed: npt.ArrayLike, accepted: npt.ArrayLike) -> None:
    """Learn from reached nodes: their claimed conditionals, and whether each was accepted."""
    logits = np.atleast_1d(logit(claimed))
    if len(logits) == 0:
        return
    outcomes = np.atleast_1d(np.asarray(accepted, dtype=np.float64))
    calibrator.sums[:-1] *= NODE_DECAY ** len(logits)
    scaled = (logits + MAX_LOGIT) * (NUM_BINS / (2.0 * MAX_LOGIT))
    bins = np.clip(scaled.astype(np.int64), 0, NUM_BINS - 1)
    by_claim = calibrator.sums[: 3 * NUM_BINS].reshape(3, NUM_BINS)
    predicted = calibrated(calibrator, claimed)
    equal = np.minimum((np.atleast_1d(predicted) * NUM_EQUAL_BINS).astype(int), NUM_EQUAL_BINS - 1)
    forecasts = calibrator.sums[3 * NUM_BINS : -1].reshape(3, NUM_EQUAL_BINS)
    for sums, places, values in (
        (by_claim, bins, (None, outcomes, logits)),
        (forecasts, equal, (None, np.atleast_1d(predicted), outcomes)),
    ):
        for row, weights in zip(sums, values, strict=True):
            row += np.bincount(places, weights=weights, minlength=len(row))
    calibrator.sums[-1] += len(logits)
    calibrator.fit_if_due()


def add(score: Score, fate: Fate) -> Indices:
    """Enter a tree and the text after it; returns the accepted among its best DRAFT_LENGTHS.

    The outcome of a node is known if its parent was reached and a token followed the parent."""
    tree, claimed = fate.seen.tree, fate.seen.claimed
    on_path = walk(tree, fate.followed)
    is_reached = np.zeros(len(tree) + 1, np.bool_)
    is_reached[-1] = True  # parent -1, the context
    is_reached[on_path if len(on_path) < len(fate.followed) else on_path[:-1]] = True
    is_known = is_reached[tree.parents]
    accepted = np.zeros(len(tree))
    accepted[on_path] = 1.0
    conditionals = claimed_conditionals(tree.parents, claimed)
    observe(score.calibrator, conditionals[is_known], accepted[is_known])
    sums = np.append(0.0, accepted[np.argsort(-claimed, kind="stable")].cumsum())
    of_best: Floats = sums[np.minimum(DRAFT_LENGTHS, len(tree))]
    score.sums *= TREE_DECAY
    score.sums[0] += 1.0
    by_length = score.sums[1:].reshape(3, len(DRAFT_LENGTHS))
    # Where a step with so many nodes would have begun here.
    by_length += (fate.seen.base_len >= fate.next_steps) * (
        np.ones(len(DRAFT_LENGTHS)),
        of_best,
        of_best**2,
    )
    return of_best.astype(np.int64)


def first_steps() -> Indices:
    """Steps begin everywhere, for there was none before: int64[DRAFT_LENGTHS]."""
    return np.zeros(len(DRAFT_LENGTHS), np.int64)


def learn(model: AcceptanceModel, fate: Fate) -> int:
    """Enter one tree as `AcceptanceModel.learn` does."""
    if not len(fate.followed):
        return -1
    (drafter, group), begun = (
        (fate.seen.drafter, fate.seen.group),
        fate.seen.base_len >= fate.next_steps,
    )
    of_best = add(model.score(drafter, group), fate)
    add(model.score(drafter, (None, group[1])), fate)
    fate.next_steps[begun] = fate.seen.base_len + of_best[begun] + 1
    return int(of_best[JUDGED_RANK]) if begun[JUDGED_RANK] else -1
