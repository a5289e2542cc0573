"""Which targets have fallen silent, and which items were lost on their way.

How long a target may take for an answer nobody knows: a prompt may be long, and the first step of
a shape may compile for a minute.  So a target names every second the items it has in hand, and what
counts is not how long an answer takes but for how long nothing is said:

    of everything it has       the target has stopped, or cannot be reached: it is left
    of one item                the item or its answer was lost: it is sent again, then taken away
    of any progress            the target hangs in a step: it is left, after a much longer time

Sending an item again is always safe: a target that has it ignores the second one, and one that has
answered it answers it once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.messages import VerdictFrame


@dataclass(slots=True, eq=False)
class _Item:
    """An item that is not answered yet.  silent_s: for how long nothing was said of it."""

    in_flight: InFlight
    silent_s: float = 0.0
    is_sent_again: bool = False


@dataclass(slots=True, eq=False)
class _Watch:
    """What has been missed of one target, in seconds: any word, and any progress."""

    silent_s: float = 0.0
    stuck_s: float = 0.0
    items: dict[str, _Item] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overdue:
    """What is to be done about a target.

    why_left: the target is to be left, and the reason; "" = it is not.  again: sessions whose items
    are to be sent again.  lost: sessions that are to be taken away from it.
    """

    why_left: str = ""
    again: tuple[Session, ...] = ()
    lost: tuple[Session, ...] = ()


class Liveness:
    """Counts the time in which each target, and each of its items, was not heard of.

    silence_s, timeout_s: `coordinator.target_silence_s` and `coordinator.target_timeout_s`.
    """

    def __init__(self, silence_s: float, timeout_s: float) -> None:
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._watches: dict[TargetSeat, _Watch] = {}

    def heard(self, seat: TargetSeat, frame: VerdictFrame) -> None:
        """A frame of the target has come."""
        watch = self._watches.get(seat)
        if watch is None:
            return  # nothing has been missed of it so far
        watch.silent_s = 0.0
        if not frame.is_heartbeat:
            watch.stuck_s = 0.0
        for named in frame.in_hand:
            item, session = watch.items.get(named.request_id), seat.sessions.get(named.request_id)
            if item and session and session.generation == named.generation:
                item.silent_s = 0.0
                item.is_sent_again = False

    def forget(self, seat: TargetSeat) -> None:
        """The target has been left."""
        self._watches.pop(seat, None)

    def pass_time(self, seat: TargetSeat, elapsed_s: float) -> Overdue:
        """Time has passed in which frames of the target would have been heard."""
        if not seat.is_owed:
            self.forget(seat)
            return Overdue()
        watch = self._watches.setdefault(seat, _Watch())
        watch.silent_s += elapsed_s
        watch.stuck_s += elapsed_s
        if watch.silent_s >= self._silence_s:
            return Overdue(f"said nothing for {watch.silent_s:.1f} s")
        if watch.stuck_s >= self._timeout_s:
            return Overdue(f"has been in one step for {watch.stuck_s:.0f} s")
        return self._overdue_items(seat, watch, elapsed_s)

    def _overdue_items(self, seat: TargetSeat, watch: _Watch, elapsed_s: float) -> Overdue:
        former, watch.items = watch.items, {}
        again: list[Session] = []
        lost: list[Session] = []
        for session in (*seat.decoding.values(), *seat.prefilling.values()):
            if session.in_flight is None:
                continue
            item = former.get(session.id)
            if item is None or item.in_flight is not session.in_flight:
                item = _Item(session.in_flight)
            watch.items[session.id] = item
            item.silent_s += elapsed_s
            if item.silent_s < self._silence_s:
                continue
            (lost if item.is_sent_again else again).append(session)
            item.silent_s, item.is_sent_again = 0.0, True
        return Overdue(again=tuple(again), lost=tuple(lost))
