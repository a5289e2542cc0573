"""Plain steps measured while the drafters are silent: what speculation must be compared with.

Where drafters share a device with the target, a plain step beside them is slower than one without
them.  Measured beside them it flatters speculation, for plain decoding would not have drafters at
all.  So now and then the drafters of a target are asked for nothing, and a few plain steps are
timed.  Kept is by which factor those are faster: the table of step times goes on following the
machine's load, and the factor corrects it.

Everything is counted in rounds: there is no clock in it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from cluster.spec.step_times import bucket

# Rounds after the drafters were silenced until they are: they hear of it with a commit, and finish
# what they have begun.
SETTLE_ROUNDS = 2
_NUM_SAMPLES = 3
# A silence that brings no samples in so many rounds (prompts come in all the time) is given up.
_MAX_ROUNDS = 16
# Rounds between two silences; twice as many each time while it turns out to make no difference.
_FIRST_INTERVAL = 512
_LAST_INTERVAL = 16384
_NO_DIFFERENCE = 0.97
# No sane machine gets slower by more than this through drafters.
_LEAST_FACTOR = 0.25


@dataclass(slots=True)
class _Times:
    """Of one bucket of sequences.  factor: quiet over usual plain steps; None = not known yet."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    factor: float | None = None


class QuietTimes:
    """By which factor plain steps are faster without drafters, by number of sequences."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}

    def record(self, num_sequences: int, step_time_s: float) -> None:
        """A plain step without drafters took so long."""
        times = self._times.setdefault(bucket(num_sequences), _Times())
        times.times_s.append(step_time_s)
        times.factor = None

    def factor(self, num_sequences: int, usual_s: float) -> float:
        """At most 1.  usual_s: what plain steps are believed to take at present."""
        times = self._times.get(bucket(num_sequences))
        if times is None or len(times.times_s) < _NUM_SAMPLES:
            return 1.0
        if times.factor is None:
            quotient = statistics.median(times.times_s) / usual_s
            times.factor = min(max(quotient, _LEAST_FACTOR), 1.0)
        return times.factor


@dataclass(slots=True)
class _Schedule:
    """due_at: the round from which on a silence is due.  interval: until the one after."""

    due_at: int = 0
    interval: int = _FIRST_INTERVAL


class Silences:
    """When the drafters of one target are to be silent."""

    def __init__(self) -> None:
        self.is_silent = False
        self._num_rounds = 0
        self._schedules: dict[int, _Schedule] = {}
        self._bucket = 0
        self._num_silent = 0
        self._num_samples = 0

    def round_ended(self, num_sequences: int, *, is_sample: bool, factor: float) -> None:
        """One more round of decoding is over.

        is_sample: it was a plain one without drafters, and measured.  factor: as far as known.
        """
        self._num_rounds += 1
        key = bucket(num_sequences)
        schedule = self._schedules.setdefault(key, _Schedule())
        if not self.is_silent:
            if self._num_rounds >= schedule.due_at:
                self.is_silent, self._bucket = True, key
                self._num_silent = self._num_samples = 0
            return
        self._num_silent += 1
        self._num_samples += is_sample and key == self._bucket
        is_measured = self._num_samples >= _NUM_SAMPLES
        if not is_measured and key == self._bucket and self._num_silent < _MAX_ROUNDS:
            return
        self.is_silent = False
        ended = self._schedules[self._bucket]
        if is_measured and factor > _NO_DIFFERENCE:
            ended.interval = min(2 * ended.interval, _LAST_INTERVAL)
        elif is_measured:
            ended.interval = _FIRST_INTERVAL
        # After one that came to nothing the next is tried sooner.
        wait = ended.interval if is_measured else _FIRST_INTERVAL // 8
        ended.due_at = self._num_rounds + wait
