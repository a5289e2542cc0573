"""Which targets have fallen silent.

How long a target may take for a step nobody knows: a prompt may be long, and the first step of a
shape may compile for a minute.  So a target says every second what it runs, and what counts is for
how long nothing is said:

    at all             the target has stopped, or cannot be reached: it is left
    of any progress    the target hangs in a step: it is left, after a much longer time

A single text that got lost is not named any more, and is opened again (`relay.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.coordinator.targets import TargetSeat
from cluster.messages import VerdictFrame


@dataclass(slots=True, eq=False)
class _Watch:
    """What has been missed of one target, in seconds: any word, and any progress."""

    silent_s: float = 0.0
    stuck_s: float = 0.0


class Liveness:
    """Counts the time in which each target was not heard of.

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
        has_stepped = frame.report is not None and frame.report.step_time_s > 0.0
        if frame.verdicts or frame.refusals or has_stepped:
            watch.stuck_s = 0.0

    def forget(self, seat: TargetSeat) -> None:
        """The target has been left."""
        self._watches.pop(seat, None)

    def why_leave(self, seat: TargetSeat, elapsed_s: float) -> str:
        """Time has passed in which frames of the target would have been heard; why it is to be left
        now, "" = it is not."""
        if not seat.sessions:
            self.forget(seat)
            return ""
        watch = self._watches.setdefault(seat, _Watch())
        watch.silent_s += elapsed_s
        watch.stuck_s += elapsed_s
        if watch.silent_s >= self._silence_s:
            return f"said nothing for {watch.silent_s:.1f} s"
        if watch.stuck_s >= self._timeout_s:
            return f"has been in one step for {watch.stuck_s:.0f} s"
        return ""
