"""What the drafters of a batch offer at present: re-rooted, calibrated and merged, all at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.coordinator.held import HeldTree, Place
from cluster.coordinator.replica import Subscription
from cluster.coordinator.session import Group, Session
from cluster.core import FloatArray
from cluster.records import record
from cluster.spec.forest import Forest, Mask
from cluster.spec.held_trees import HeldTrees, MergedTrees
from cluster.spec.merge_trees import merge_trees
from cluster.spec.survival import Calibrator

CalibratorOf = Callable[[str, Group], Calibrator]  # by drafter and group


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
    if not any(len(row.held.tree.token_ids) for row in rows):
        for row in rows:
            if row.subscription.growth is not None:
                row.subscription.growth.look(None)
        return None
    found = merge_trees(_held(rows, len(batch), calibrator))
    drafters = _note(rows, found, len(batch))
    if found.merged.num_nodes == 0:
        return None
    return Offers(found.merged, found.survival, drafters, found.claims)


def _held(rows: Sequence[_Row], num_groups: int, calibrator: CalibratorOf) -> HeldTrees:
    """The trees as they were proposed, or as the last batch has left them."""
    return HeldTrees(
        [row.held.tree for row in rows],
        [row.held.survival for row in rows],
        [row.held.calibrated for row in rows],
        [calibrator(row.name, row.session.group) for row in rows],
        [row.session.tokens.since(row.held.base_len) for row in rows],
        [row.index for row in rows],
        [_or_nan(row.subscription.log_loss) for row in rows],
        num_groups,
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _note(rows: Sequence[_Row], found: MergedTrees, num_sessions: int) -> list[tuple[str, ...]]:
    """Leave with each session what has become of its trees; returns the drafters of each."""
    drafters: list[tuple[str, ...]] = [()] * num_sessions
    forest, calibrated = found.left, found.calibrated
    bounds = forest.starts.tolist()
    for index, (row, root) in enumerate(zip(rows, found.roots.tolist(), strict=True)):
        held, growth = row.held, row.subscription.growth
        start, stop = bounds[index], bounds[index + 1]
        if root == -2:
            row.subscription.held = None
        elif root >= 0:
            held.place = Place(forest, found.claimed, calibrated, index)
            held.base_len = len(row.session.tokens)
        elif held.calibrated is None:
            held.calibrated = calibrated[start:stop]
        if growth is not None and growth.is_hit is None:
            if start < stop:
                growth.look(held.proposed_len, calibrated[start:stop])
            else:
                growth.look(None)
        if start < stop:
            drafters[row.index] += (row.name,)
    return drafters
