"""What the drafters of a batch offer at present: re-rooted, calibrated and merged, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.coordinator.session import HeldTree, Place, Session, Subscription
from cluster.core import FloatArray, TokenArray
from cluster.records import record
from cluster.spec.forest import (
    Floats,
    Forest,
    Indices,
    Mask,
    below,
    concatenated,
    conditioned,
    join,
    merge,
    walk,
)
from cluster.spec.survival import Calibrator

# By drafter and task.
CalibratorOf = Callable[[str, str], Calibrator]


@record(frozen=True, slots=True, eq=False)
class Offers:
    """One tree per session of the batch, the union of its drafters' reachable ones.

    survival: float32[n], calibrated, not increasing along a path.  drafters: of each session.
    claimed: float32[k, n], what the i-th drafter of a node's session claimed for it; NaN where it
    did not propose the node.
    """

    forest: Forest
    survival: FloatArray
    drafters: list[tuple[str, ...]]
    claimed: FloatArray

    def keep(self, kept: Mask) -> Offers:
        """The nodes where kept, each with its parent."""
        return Offers(
            self.forest.keep(kept), self.survival[kept], self.drafters, self.claimed[:, kept]
        )


@dataclass(slots=True)
class _Row:
    """The tree of one drafter for one session, which is the batch's index-th."""

    index: int
    name: str
    session: Session
    subscription: Subscription
    held: HeldTree


def gather(batch: Sequence[Session], calibrator: CalibratorOf) -> Offers | None:
    """The offers for `batch`; None when no drafter has anything for any of it.

    Held trees are re-rooted at the last committed token and calibrated, once for good.
    """
    rows: list[_Row] = []
    for index, session in enumerate(batch):
        subscriptions = session.subscriptions
        for name in session.drafters if subscriptions else ():
            subscription = subscriptions.get(name)
            if subscription is None:
                continue
            held = subscription.held
            if held is not None:
                if held.place is not None:
                    held.settle()
                rows.append(_Row(index, name, session, subscription, held))
            elif subscription.growth is not None:
                subscription.growth.look(None)
    forest = join([row.held.tree for row in rows])
    if forest.num_nodes == 0:
        for row in rows:
            if row.subscription.growth is not None:
                row.subscription.growth.look(None)
        return None
    forest, claimed, calibrated = _advance(rows, forest, calibrator)
    return _union(batch, rows, forest, claimed, calibrated) if forest.num_nodes else None


def _advance(
    rows: Sequence[_Row], forest: Forest, calibrator: CalibratorOf
) -> tuple[Forest, FloatArray, FloatArray]:
    """Re-root the held trees, calibrate those that are new, and note both in the rows."""
    committed: list[TokenArray] = [row.session.tokens.since(row.held.base_len) for row in rows]
    roots = walk(forest, committed)
    claimed = concatenated([row.held.survival for row in rows])
    known = [row.held.calibrated for row in rows]
    is_new = any(each is None for each in known)
    calibrated = claimed
    if not is_new or not all(each is None for each in known):
        calibrated = concatenated(
            [row.held.survival if each is None else each
             for row, each in zip(rows, known, strict=True)]
        )  # fmt: skip
    has_moved = bool((roots != -1).any())
    if has_moved:
        kept = below(forest, roots)
        rest = forest.keep(kept)
        of_claims = conditioned(claimed, forest, roots, kept)
        calibrated = (
            of_claims if calibrated is claimed else conditioned(calibrated, forest, roots, kept)
        )
        forest, claimed = rest, of_claims
    if is_new:
        calibrated = _calibrate(rows, forest, claimed, calibrated, calibrator)
    _note(rows, forest, roots, claimed, calibrated)
    return forest, claimed, calibrated


def _calibrate(
    rows: Sequence[_Row],
    forest: Forest,
    claimed: FloatArray,
    calibrated: FloatArray,
    calibrator: CalibratorOf,
) -> FloatArray:
    """`calibrated`, with the values of trees that have none yet from their claims."""
    groups: dict[tuple[str, str], list[int]] = {}
    for place, row in enumerate(rows):
        if row.held.calibrated is None:
            groups.setdefault((row.name, row.session.request.task), []).append(place)
    if len(groups) == 1:
        ((key, places),) = groups.items()
        if len(places) == len(rows):
            return calibrator(*key).survivals(forest, claimed)
    calibrated = calibrated.copy()
    for key, places in groups.items():
        is_theirs = np.zeros(len(rows), dtype=np.bool_)
        is_theirs[places] = True
        nodes = is_theirs[forest.owners]
        calibrated[nodes] = calibrator(*key).survivals(forest.keep(nodes), claimed[nodes])
    return calibrated


def _note(
    rows: Sequence[_Row],
    forest: Forest,
    roots: Indices,
    claimed: FloatArray,
    calibrated: FloatArray,
) -> None:
    """Leave with each session what has become of its trees."""
    bounds = forest.starts.tolist()
    for index, (row, root) in enumerate(zip(rows, roots.tolist(), strict=True)):
        held, growth = row.held, row.subscription.growth
        start, stop = bounds[index], bounds[index + 1]
        if root == -2:
            row.subscription.held = None
        elif root >= 0:
            held.place = Place(forest, claimed, calibrated, index)
            held.base_len = len(row.session.tokens)
        elif held.calibrated is None:
            held.calibrated = calibrated[start:stop]
        if growth is not None and growth.is_hit is None:
            if start < stop:
                growth.look(held.proposed_len, calibrated[start:stop])
            else:
                growth.look(None)


def _union(
    batch: Sequence[Session],
    rows: Sequence[_Row],
    forest: Forest,
    claimed: FloatArray,
    calibrated: FloatArray,
) -> Offers:
    """The trees of each session as one."""
    counts = np.diff(forest.starts).tolist()
    shares = np.ones(len(rows))
    drafters: list[tuple[str, ...]] = [()] * len(batch)
    members: list[list[int]] = [[] for _ in batch]
    for place, row in enumerate(rows):
        if counts[place]:
            members[row.index].append(place)
            drafters[row.index] += (row.name,)
    width = max(map(len, drafters))
    groups = np.array([row.index for row in rows], dtype=np.int64)
    if width <= 1:
        # Calibrated survivals do not increase along a path by themselves.
        starts = np.searchsorted(groups[forest.owners], np.arange(len(batch) + 1))
        one_each = Forest(forest.token_ids, forest.parents, groups[forest.owners], starts)
        return Offers(one_each, calibrated, drafters, claimed[np.newaxis])
    slots = np.zeros(len(rows), dtype=np.int64)
    for places in members:
        if len(places) > 1:
            slots[places] = range(len(places))
            shares[places] = _shares([rows[place].subscription.log_loss for place in places])
    merged = merge(forest, groups, len(batch), calibrated, shares)
    of_each: FloatArray = np.full((width, merged.forest.num_nodes), np.nan, dtype=np.float32)
    of_each[slots[forest.owners], merged.places] = claimed
    return Offers(merged.forest, merged.survival, drafters, of_each)


def _shares(losses: Sequence[float | None]) -> Floats:
    """Trust in each drafter, by how well it has predicted this text; without evidence, equal.

    exp(-loss) is the geometric mean of the probabilities it gave to the committed tokens.
    """
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return np.full(len(losses), 1.0 / len(losses))
    best = min(known)
    weights = [math.exp(best - loss) for loss in known]
    return np.array(weights) / sum(weights)
