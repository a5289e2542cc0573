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
# Rounds in a row at another load that end it.  Where a request ends the next one's prompt has to be
# read first: fewer rounds are no change of load.
_ELSEWHERE_ROUNDS = 4
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
    pause: length of the last pause, in rounds; paused_until: the round with which it ends.
    """

    due_at: int = 0
    interval: int = _FIRST_INTERVAL
    pause: int = 0
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
        self._num_elsewhere = 0  # rounds in a row at another load than the silence is for

    @property
    def num_left(self) -> int:
        """In how many rounds at least the drafters are still to be silent; 0: they are not."""
        if not self.is_silent:
            return 0
        return max(self._schedules[self._bucket].paused_until - self._num_rounds, 1)

    def pause(self, num_sequences: int, *, has_gained: bool | None = False) -> None:
        """What the drafters offer at this load is of no use now.

        has_gained: speculation was faster than plain decoding since the last pause; None: there
        was too little of it to tell.
        """
        schedule = self._schedules.setdefault(bucket(num_sequences), _Schedule())
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
        self._begin(bucket(num_sequences))

    def round_ended(self, num_sequences: int, *, is_sample: bool, factor: float) -> None:
        """One more round of decoding is over.

        is_sample: it was a plain one without drafters, and measured.  factor: as far as known.
        """
        self._num_rounds += 1
        key = bucket(num_sequences)
        schedule = self._schedules.setdefault(key, _Schedule())
        if not self.is_silent:
            if self._num_rounds >= schedule.due_at or schedule.paused_until > self._num_rounds:
                self._begin(key)
            return
        self._num_silent += 1
        if key != self._bucket:
            self._num_elsewhere += 1
            if self._num_elsewhere < _ELSEWHERE_ROUNDS:
                return
            if schedule.paused_until > self._num_rounds:
                self._begin(key)
                return
            self._end(None)
            return
        self._num_elsewhere = 0
        self._num_samples += is_sample
        if self._num_rounds < schedule.paused_until:
            return
        if self._num_samples >= _NUM_SAMPLES or self._num_silent >= _MAX_ROUNDS:
            self._end(factor)

    def _begin(self, key: int) -> None:
        self.is_silent, self._bucket = True, key
        self._num_silent = self._num_samples = self._num_elsewhere = 0

    def _end(self, factor: float | None) -> None:
        """factor: as of `round_ended`; None = the load has changed.

        A pause that this has cut short goes on when the load is back.
        """
        self.is_silent = False
        ended = self._schedules[self._bucket]
        is_measured = self._num_samples >= _NUM_SAMPLES
        if is_measured and factor is not None:
            longer = min(2 * ended.interval, _LAST_INTERVAL)
            ended.interval = longer if factor > _NO_DIFFERENCE else _FIRST_INTERVAL
        # After one that came to nothing the next is tried sooner.
        wait = ended.interval if is_measured else _FIRST_INTERVAL // 8
        ended.due_at = self._num_rounds + wait
