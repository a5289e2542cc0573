"""Plain steps measured while the drafters are silent: what speculation must be compared with.

Where drafters share a device with the target, a plain step beside them is slower than one without
them.  Measured beside them it flatters speculation, for plain decoding would not have drafters at
all.  So now and then the drafters of a target are asked for nothing, and a few plain steps are
timed.  By which factor those are faster corrects the table of step times.

Drafters are also silenced for a while where the budget has declined everything they offered some
times in a row: plain decoding is what is wanted then, and at its full speed.

Everything is counted in rounds: there is no clock in it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from cluster.spec.step_times import bucket

# Rounds after the drafters were silenced until they are: they hear of it with a commit, and finish
# what they have begun.
SETTLE_ROUNDS = 2
# Rounds after drafters were set to work until they are at it.
BUSY_ROUNDS = 2
_NUM_SAMPLES = 3
# That are remembered: those of one silence outvote what was before.
_MAX_SAMPLES = 5
# A silence that brings no samples in so many rounds (prompts come in all the time) is given up.
_MAX_ROUNDS = 16
# Rounds between two silences; twice as many each time while it turns out to make no difference.
_FIRST_INTERVAL = 512
_LAST_INTERVAL = 16384
_NO_DIFFERENCE = 0.97
# A pause for drafters that are of no use, four times as long when they were of none since the last
# one, and half as long when they were, all their rounds together: texts differ, and what fails now
# may hold a few rounds later.  As long as the last one where the few rounds since then tell
# nothing, for the account is overdrawn still.  One that comes so many rounds after the last is a
# first one again.
_FIRST_PAUSE = 32
_SHORTEST_PAUSE = 8
_LONGEST_PAUSE = 512
_PAUSE_FACTOR = 4
_GAIN_FACTOR = 2
_FORGOTTEN = 128
# No sane machine gets slower by more than this through drafters.
_LEAST_FACTOR = 0.25


class QuietTimes:
    """Plain steps without drafters, by number of sequences."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self._times: dict[int, deque[float]] = {}

    def record(self, num_sequences: int, step_time_s: float) -> None:
        """A plain step without drafters took so long."""
        self.num_recorded += 1
        key = bucket(num_sequences)
        self._times.setdefault(key, deque(maxlen=_MAX_SAMPLES)).append(step_time_s)

    def factor(self, num_sequences: int, usual_s: float) -> float:
        """At most 1.  usual_s: what plain steps beside drafters are believed to take at present.

        Where the machine has become slower for everybody since the last silence this is too low:
        speculation is declined then, which brings a pause, and with it new samples.
        """
        times_s = self._times.get(bucket(num_sequences), ())
        if len(times_s) < _NUM_SAMPLES:
            return 1.0
        return min(max(statistics.median(times_s) / usual_s, _LEAST_FACTOR), 1.0)


@dataclass(slots=True)
class _Schedule:
    """Of one bucket of sequences.

    due_at: the round from which on a silence is due.  interval: until the one after.
    pause: length of the last pause, in rounds; former_pause: of the one before; paused_until: the
    round with which it ends.
    """

    due_at: int = 0
    interval: int = _FIRST_INTERVAL
    pause: int = 0
    former_pause: int = 0
    paused_until: int = 0


class Silences:
    """When the drafters of one target are to be silent."""

    def __init__(self) -> None:
        self.is_silent = False
        self._num_rounds = 0
        self._schedules: dict[int, _Schedule] = {}
        self._bucket = 0
        self._num_silent = 0
        self._num_samples = 0

    def pause(self, num_sequences: int, *, has_gained: bool | None = False) -> None:
        """What the drafters offer at this load is of no use now.

        has_gained: speculation was faster than plain decoding since the last pause; None: there
        was too little of it to tell.
        """
        schedule = self._schedules.setdefault(bucket(num_sequences), _Schedule())
        schedule.former_pause = schedule.pause
        is_again = self._num_rounds <= schedule.paused_until + _FORGOTTEN and schedule.pause > 0
        former = schedule.pause if is_again else 0
        if has_gained:
            length = max((former or _FIRST_PAUSE) // _GAIN_FACTOR, _SHORTEST_PAUSE)
        elif has_gained is None:
            length = former or _FIRST_PAUSE
        else:
            length = min(former * _PAUSE_FACTOR, _LONGEST_PAUSE) if former else _FIRST_PAUSE
        schedule.pause = length
        schedule.paused_until = self._num_rounds + length
        self.is_silent, self._bucket = True, bucket(num_sequences)
        self._num_silent = self._num_samples = 0

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
        if key == self._bucket and self._num_rounds < schedule.paused_until:
            return
        if not is_measured and key == self._bucket and self._num_silent < _MAX_ROUNDS:
            return
        self.is_silent = False
        ended = self._schedules[self._bucket]
        if self._num_rounds < ended.paused_until:  # cut short: it says nothing of the next one
            ended.paused_until = self._num_rounds
            ended.pause = ended.former_pause
        if is_measured and factor > _NO_DIFFERENCE:
            ended.interval = min(2 * ended.interval, _LAST_INTERVAL)
        elif is_measured:
            ended.interval = _FIRST_INTERVAL
        # After one that came to nothing the next is tried sooner.
        wait = ended.interval if is_measured else _FIRST_INTERVAL // 8
        ended.due_at = self._num_rounds + wait
