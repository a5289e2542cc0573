"""What drafters may be expected to send soon, learned from what they sent so far."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator.held import Growth
from cluster.coordinator.replica import Subscription
from cluster.coordinator.session import Group, Session
from cluster.core import Completion, FloatArray, Proposal, TokenTree
from cluster.metrics import Recorder
from cluster.spec.arrivals import GRID_S, ArrivalTable, grown
from cluster.spec.forest import Floats, Mask, concatenated, join
from cluster.spec.survival import Calibrator

_MAX_TABLES = 1024
# The first commits of a (drafter, group) are all learned from, then one in so many: calibrating
# every tree that is streamed would cost more than it tells.
_NUM_LEARNED_AT_FIRST = 64
_LEARNED_INTERVAL = 16
# A drafter that sends more trees within the grid is one whose first ones tell enough.
_MAX_TREES = 64


@dataclass(slots=True)
class _Entry:
    table: ArrivalTable
    num_commits: int = 0


class ArrivalModel:
    """Price lists by drafter and group, and which drafters have lost their credit.

    Everything between a commit and the next frame is O(1); lessons are kept for `settle`.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.max_wait_s = 0.0
        if config.budget == "adaptive":
            self.max_wait_s = config.max_draft_wait_ms / 1000.0
        self._max_broken = config.breaker_failures
        self._entries: dict[tuple[str, Group], _Entry] = {}  # by drafter
        self._lessons: list[tuple[str, Group, Growth, float, float]] = []
        self._num_looked: Counter[tuple[str, str, bool]] = Counter()  # drafter, task, a hit

    def committed(
        self, session: Session, name: str, subscription: Subscription, now: float
    ) -> None:
        """New tokens of `session` are about to be sent to drafter `name`."""
        context_len, former = len(session.tokens), subscription.growth
        if self.max_wait_s == 0.0 or (former and former.context_len == context_len):
            return
        if former and former.is_hit is not None:
            self._num_looked[name, session.request.task, former.is_hit] += 1
        if former and former.is_learned and former.is_hit is not None:
            since = former.committed_at
            idle_s = max(session.dispatched_at - since, 0.0)
            self._lessons.append((name, session.group, former, now - since, idle_s))
        entry = self._entry(name, session.group)
        entry.num_commits += 1
        is_learned = (
            entry.num_commits <= _NUM_LEARNED_AT_FIRST or entry.num_commits % _LEARNED_INTERVAL == 0
        )
        subscription.growth = Growth(now, context_len, is_learned)

    def arrived(self, subscription: Subscription, proposal: Proposal, now: float) -> bool:
        """Note a proposal; True when it is a tree for what is committed at present."""
        growth = subscription.growth
        if growth is None or proposal.base_len != growth.context_len or not len(proposal.tree):
            return False
        growth.is_complete = proposal.is_complete
        delay_s = now - growth.committed_at
        if not growth.is_answered:
            growth.is_answered = True
            if delay_s <= self.max_wait_s:
                subscription.replica.num_missed_arrivals = 0
        if growth.is_hit is None:
            growth.is_learned = False  # what was at hand before is not known any more
        if growth.is_learned and len(growth.trees) < _MAX_TREES and delay_s <= GRID_S[-1]:
            growth.trees.append((delay_s, proposal.tree, proposal.survival))
        return True

    def completed(
        self, session: Session, subscription: Subscription, completion: Completion
    ) -> bool:
        """Note that nothing else comes; True when that holds for all the session's drafters."""
        growth = subscription.growth
        if growth is None or completion.base_len != growth.context_len:
            return False
        growth.is_answered = growth.is_complete = True
        return self.is_settled(session)

    def is_settled(self, session: Session) -> bool:
        """Whether no drafter has anything to add to what it has sent since the last commit."""
        return all(
            subscription.growth is None or subscription.growth.is_complete
            for subscription in session.subscriptions.values()
        )

    def outstanding(self, session: Session) -> bool:
        """Whether a drafter of credit has been told of the last commit and not answered yet."""
        return any(
            subscription.growth is not None
            and not subscription.growth.is_answered
            and subscription.replica.num_missed_arrivals < self._max_broken
            for subscription in session.subscriptions.values()
        )

    def learn_from(self, session: Session) -> None:
        """What follows its last commit is of interest, however often that was seen before."""
        for subscription in session.subscriptions.values():
            growth = subscription.growth
            if growth is not None and not growth.is_answered and growth.is_hit is not None:
                growth.is_learned = True

    def broken(self, session: Session) -> None:
        """The time was up, and nothing came for `session`."""
        for subscription in session.subscriptions.values():
            growth = subscription.growth
            if growth is not None and not growth.is_answered:
                growth.is_answered = True  # too late to be to its credit
                subscription.replica.num_missed_arrivals += 1

    def expected(
        self, sessions: Sequence[Session], at_hand: Floats, now: float
    ) -> tuple[Floats, Mask] | None:
        """What each session may be expected to have soon; None = nothing more, for any of them.

        at_hand: float64[sessions, NUM_RANKS], as `profile` gives them.  Returns the survivals
        after each of WAITS_S, float64[sessions, waits, ranks], and where they say anything,
        bool[sessions].  Of several drafters the most promising one counts.
        """
        rows: list[int] = []
        slots: list[int] = []
        # Sessions that were committed to at the same time share an answer.
        known: dict[tuple[str, Group, bool | None, float], int | None] = {}
        curves: list[Floats] = []
        for row, session in enumerate(sessions):
            group = session.group
            for name, subscription in session.subscriptions.items():
                growth = subscription.growth
                if growth is None or growth.is_complete:
                    continue
                if subscription.replica.num_missed_arrivals >= self._max_broken:
                    continue
                key = (name, group, growth.is_hit, growth.committed_at)
                if key not in known:
                    found = self._curves(name, group, growth, now)
                    known[key] = None if found is None else len(curves)
                    if found is not None:
                        curves.append(found)
                slot = known[key]
                if slot is not None:
                    rows.append(row)
                    slots.append(slot)
        if not rows:
            return None
        later = grown(np.array(curves)[slots], at_hand[rows])
        arriving = np.repeat(at_hand[:, np.newaxis], later.shape[1], axis=1)
        firsts = [place for place, row in enumerate(rows) if place == 0 or row != rows[place - 1]]
        arriving[[rows[first] for first in firsts]] = np.maximum.reduceat(later, firsts, axis=0)
        is_arriving: Mask = np.any(arriving > at_hand[:, np.newaxis], axis=(1, 2))
        return (arriving, is_arriving) if is_arriving.any() else None

    def _curves(self, name: str, group: Group, growth: Growth, now: float) -> Floats | None:
        since_s = now - growth.committed_at
        entry = self._entries.get((name, group))
        if entry is None or since_s >= GRID_S[-1]:
            return None
        return entry.table.curves(hit=bool(growth.is_hit), since_s=since_s)

    def settle(self, calibrator: Callable[[str, Group], Calibrator]) -> None:
        """Learn from the commits that are complete.  calibrator: by drafter and group."""
        alike: dict[tuple[str, Group], list[tuple[Growth, float, float]]] = {}
        for name, group, growth, elapsed_s, idle_s in self._lessons:
            alike.setdefault((name, group), []).append((growth, elapsed_s, idle_s))
        self._lessons.clear()
        for key, lessons in alike.items():
            newest = [_newest_per_mark(growth, idle_s) for growth, _, idle_s in lessons]
            forest = join([tree for trees in newest for _, tree, _ in trees])
            claimed = concatenated([survival for trees in newest for _, _, survival in trees])
            calibrated = calibrator(*key).survivals(forest, claimed) if len(claimed) else claimed
            index, table = 0, self._entry(*key).table
            for trees, (growth, elapsed_s, idle_s) in zip(newest, lessons, strict=True):
                seen: list[tuple[float, FloatArray]] = []
                if growth.at_hand is not None:
                    seen.append((0.0, growth.at_hand))
                for delay_s, _, _ in trees:
                    seen.append((delay_s, calibrated[forest.span(index)]))
                    index += 1
                table.observe(
                    hit=bool(growth.is_hit), elapsed_s=elapsed_s, trees=seen, idle_s=idle_s
                )

    def record(self, recorder: Recorder) -> None:
        """Export how often drafts were there before they were needed, since the last call."""
        for (drafter, task, is_hit), count in self._num_looked.items():
            outcome = "hit" if is_hit else "miss"
            recorder.add(metrics.PRE_DRAFTED, count, drafter=drafter, task=task, outcome=outcome)
        self._num_looked.clear()

    def _entry(self, name: str, group: Group) -> _Entry:
        key = (name, group)
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= _MAX_TABLES:
                # Tasks are named by clients; the oldest one makes room.
                del self._entries[next(iter(self._entries))]
            entry = self._entries[key] = _Entry(ArrivalTable())
        return entry


def _newest_per_mark(growth: Growth, idle_s: float) -> list[tuple[float, TokenTree, FloatArray]]:
    """Of the trees that arrived, those that were the newest at some point of the grid, or when the
    target went to work."""
    marks_s = (*GRID_S, idle_s)
    ends_s = [delay_s for delay_s, _, _ in growth.trees[1:]] + [math.inf]
    return [
        tree
        for tree, end_s in zip(growth.trees, ends_s, strict=False)
        if any(tree[0] <= mark_s < end_s for mark_s in marks_s)
    ]
