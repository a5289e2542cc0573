"""Waits for drafts that are about to arrive: bounded by a timer, ended by what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cluster import metrics
from cluster.coordinator.arrivals import ArrivalModel
from cluster.coordinator.session import Seat, Session
from cluster.coordinator.targets import TargetSeat
from cluster.metrics import Recorder


class TimerHandle(Protocol):
    """A call that is due some time."""

    def cancel(self) -> None:
        """Do not call; no error when it has been called."""
        ...


# Calls back after so many seconds, from the event loop.
Timer = Callable[[float, Callable[[], None]], TimerHandle]


def event_loop_timer(delay_s: float, callback: Callable[[], None]) -> TimerHandle:
    """The timer of the running event loop."""
    return asyncio.get_running_loop().call_later(delay_s, callback)


@dataclass(slots=True, eq=False)
class _Wait:
    """missing: sessions whose drafts have not come yet, of those it is for.

    timer: None when the time is up.  is_trial: it lasts until then, or until nothing else comes.
    """

    seat: TargetSeat
    began_at: float
    missing: dict[str, Session]
    timer: TimerHandle | None = None
    is_trial: bool = False
    awaited: set[str] = field(default_factory=set)
    has_arrived: bool = False


class DraftWaits:
    """At most one wait per target; nothing here blocks, the round loop is only told to hold."""

    def __init__(self, arrivals: ArrivalModel, recorder: Recorder, timer: Timer) -> None:
        self._arrivals = arrivals
        self._recorder = recorder
        self._timer = timer
        self._waits: dict[Seat, _Wait] = {}

    def holds(self, seat: TargetSeat) -> bool:
        """Whether the next batch of `seat` is still waiting for something that may come."""
        wait = self._waits.get(seat)
        if wait is None or wait.timer is None:
            return False
        wait.missing = {key: value for key, value in wait.missing.items() if key in seat.ready}
        return bool(wait.missing)

    def left_s(self, seat: TargetSeat, now: float) -> float:
        """How much longer the next batch of `seat` may wait."""
        wait = self._waits.get(seat)
        if wait is None:
            return self._arrivals.max_wait_s
        if wait.timer is None:
            return 0.0
        return max(wait.began_at + self._arrivals.max_wait_s - now, 0.0)

    def waited_s(self, seat: TargetSeat, now: float) -> float:
        """How long the next batch of `seat` has waited."""
        wait = self._waits.get(seat)
        return now - wait.began_at if wait else 0.0

    def begin(
        self,
        seat: TargetSeat,
        sessions: Iterable[Session],
        wait_s: float,
        now: float,
        expire: Callable[[TargetSeat], None],
        *,
        is_trial: bool = False,
    ) -> None:
        """Wait, or wait on; `expire(seat)` is called if nothing ends it before the time is up.

        is_trial: no arrival of drafts does, but for the last ones.
        """
        wait = self._waits.setdefault(seat, _Wait(seat, now, {}))
        if wait.timer is not None:
            wait.timer.cancel()
        wait.is_trial = is_trial
        wait.missing = {session.id: session for session in sessions}
        wait.awaited.update(wait.missing)

        def time_is_up() -> None:
            wait.timer = None
            expire(seat)

        wait.timer = self._timer(wait_s, time_is_up)

    def arrived(self, session: Session) -> TargetSeat | None:
        """Drafts of `session` have come, or none will.  Returns the seat whose wait is over by
        that, if any."""
        seat = session.target
        wait = self._waits.get(seat) if seat is not None else None
        if wait is None or session.id not in wait.missing:
            return None
        wait.has_arrived = True
        if wait.is_trial and not self._arrivals.is_settled(session):
            return None
        del wait.missing[session.id]
        return None if wait.missing else wait.seat

    def end(self, seat: TargetSeat, now: float) -> tuple[float, frozenset[str]]:
        """The batch goes now.  Returns how long it has waited, and for which sessions."""
        wait = self._waits.pop(seat, None)
        if wait is None:
            return 0.0, frozenset()
        outcome = "arrived" if wait.has_arrived else "moot"
        if wait.timer is not None:
            wait.timer.cancel()
        else:
            late = [each for each in wait.missing.values() if self._arrivals.outstanding(each)]
            if late:
                outcome = "late"
            for session in late:
                self._arrivals.broken(session)
        self._recorder.add(metrics.DRAFT_WAITS, outcome=outcome)
        self._recorder.add(metrics.DRAFT_WAITED, now - wait.began_at)
        return now - wait.began_at, frozenset(wait.awaited)

    def drop(self, seat: TargetSeat, now: float) -> None:
        """There is no batch to wait for any more; no error when there was no wait."""
        wait = self._waits.pop(seat, None)
        if wait is not None:
            if wait.timer is not None:
                wait.timer.cancel()
            self._recorder.add(metrics.DRAFT_WAITS, outcome="moot")
            self._recorder.add(metrics.DRAFT_WAITED, now - wait.began_at)
