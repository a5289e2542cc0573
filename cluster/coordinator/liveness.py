"""Which targets have fallen silent.

How long a target may take for a step nobody knows: a prompt may be long, and the first step of a
shape may compile for a minute.  So a target says every second what it runs, and what counts is for
how long nothing is said:

    at all             the target has stopped, or cannot be reached: it is left
    of any progress    the target hangs in a step: it is left, after a much longer time, which
                       grows with what its steps have taken

A single text that got lost is not named any more, and is opened again (`relay.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.messages import VerdictFrame

# A step that takes so many times as long as any of the last ones hangs: a chunk of a prompt takes
# some tens of times as long as a step without one, and those are among the last ones.
_STUCK_FACTOR = 10.0
# What is left of the longest time without progress with every progress, so that one long step, say
# the first of a shape, is forgotten after some hundreds.
_MEMORY = 0.99


@dataclass(slots=True)
class Liveness:
    """For how many seconds a target with work has said nothing, and has made no progress."""

    silent_s: float = 0.0
    stuck_s: float = 0.0
    _longest_s: float = 0.0
    _num_steps: int = 0

    def heard(self, frame: VerdictFrame) -> None:
        """A frame of the target has come."""
        self.silent_s = 0.0
        num_steps = self._num_steps if frame.load is None else frame.load.num_steps
        if frame.verdicts or frame.refusals or num_steps != self._num_steps:
            self._longest_s = max(_MEMORY * self._longest_s, self.stuck_s)
            self.stuck_s = 0.0
        self._num_steps = num_steps

    def missed(self, elapsed_s: float, *, has_work: bool) -> None:
        """Time has passed in which frames of the target would have been heard."""
        self.silent_s = self.silent_s + elapsed_s if has_work else 0.0
        self.stuck_s = self.stuck_s + elapsed_s if has_work else 0.0

    def why_leave(self, silence_s: float, timeout_s: float) -> str:
        """Return why the target is to be left now, "" if it is not.

        silence_s, timeout_s: `coordinator.target_silence_s` and `coordinator.target_timeout_s`,
        which is the least patience with a step.
        """
        if self.silent_s >= silence_s:
            return f"said nothing for {self.silent_s:.1f} s"
        if self.stuck_s >= max(timeout_s, _STUCK_FACTOR * self._longest_s):
            return f"has been in one step for {self.stuck_s:.0f} s"
        return ""
