"""Waits for drafts that are about to arrive: bounded by a timer, ended when all is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster import metrics
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
    """missing: sessions whose drafters have more to say.  timer: None when the time is up."""

    began_at: float
    missing: dict[str, Session]
    timer: TimerHandle | None = None
    has_arrived: bool = False


class DraftWaits:
    """At most one wait per target; nothing here blocks, the round loop is only told to hold."""

    def __init__(self, max_wait_s: float, recorder: Recorder, timer: Timer) -> None:
        self._max_wait_s = max_wait_s
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

    def left_s(self, seat: TargetSeat) -> float:
        """How long the next batch of `seat` may wait: once, so not at all after it has."""
        return 0.0 if seat in self._waits else self._max_wait_s

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
    ) -> None:
        """Wait; `expire(seat)` is called if nothing ends it before the time is up."""
        wait = self._waits[seat] = _Wait(now, {session.id: session for session in sessions})

        def time_is_up() -> None:
            wait.timer = None
            expire(seat)

        wait.timer = self._timer(wait_s, time_is_up)

    def arrived(self, session: Session) -> TargetSeat | None:
        """Drafts of `session` have come, or none will.  Returns the seat whose wait is over by
        that, if any: it goes on while more may come, which is what its length was priced for."""
        seat = session.target
        wait = self._waits.get(seat) if seat is not None else None
        if wait is None or session.id not in wait.missing:
            return None
        wait.has_arrived = True
        if not session.is_settled:
            return None
        del wait.missing[session.id]
        return None if wait.missing or not isinstance(seat, TargetSeat) else seat

    def end(self, seat: TargetSeat, now: float) -> float:
        """The batch goes now.  Returns how long it has waited."""
        wait = self._waits.pop(seat, None)
        if wait is None:
            return 0.0
        outcome = "arrived" if wait.has_arrived else "late" if wait.timer is None else "moot"
        self._record(wait, outcome, now)
        return now - wait.began_at

    def drop(self, seat: TargetSeat, now: float) -> None:
        """There is no batch to wait for any more; no error when there was no wait."""
        wait = self._waits.pop(seat, None)
        if wait is not None:
            self._record(wait, "moot", now)

    def _record(self, wait: _Wait, outcome: str, now: float) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
        self._recorder.add(metrics.DRAFT_WAITS, outcome=outcome)
        self._recorder.add(metrics.DRAFT_WAITED, now - wait.began_at)
