"""Whether to speculate at all, for one target, law and load: four states and one back-off.

    SPECULATE  the budget decides, step by step
    PLAIN      nothing that was at hand for a while was worth its time: residents draft only to be
               scored, in a small share of rounds; it ends as soon as something is worth it
    PAUSE      speculation has lost time in fact, whatever was promised: nothing is verified or
               drafted until the back-off is over
    RETRY      after it: as SPECULATE, but a little evidence decides; where it loses again the
               back-off is twice as long, where it gains it starts anew

The budget goes by what it expects.  PAUSE is for what nobody expects: costs that no table holds.
"""

from __future__ import annotations

import enum
import logging
import math

from cluster.spec import evidence

log = logging.getLogger(__name__)

# Seconds without a step worth drafts after which it is PLAIN, and the first back-off: long beside a
# step and a text's dull passages, short beside a text.  The last back-off: a mistake is found out
# within a minute.
_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0
# A loss is one by so many standard errors.
_BEYOND_DOUBT = 3.0
# So many rounds tell whatever they say, and the next ones are counted anew.
_MOST_ROUNDS = 256


class State(enum.StrEnum):
    SPECULATE = "speculate"
    PLAIN = "plain"
    PAUSE = "pause"
    RETRY = "retry"


class Throttle:
    """Times are seconds of any one monotonic clock."""

    def __init__(self, name: str = "") -> None:
        """name: of the target, law and load, for the log."""
        self._name = name
        self._state = State.SPECULATE
        self._worth_at: float | None = None  # when a step was last worth drafts
        self._paused_until = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._longest_s = 0.0  # a plain round
        self._count_anew()

    def state(self, now: float) -> State:
        if self._state is State.PAUSE and now >= self._paused_until:
            self._turn(State.RETRY, "the back-off is over")
        return self._state

    def judged(self, now: float, *, is_worth: bool) -> None:
        """The budget has looked at a batch; is_worth: there was something to verify or draft."""
        if is_worth or self._worth_at is None:
            self._worth_at = now
        if self._state is State.PLAIN and is_worth:
            self._turn(State.SPECULATE, "drafts are worth their time again")
        elif self._state is State.SPECULATE and now - self._worth_at >= _FIRST_BACKOFF_S:
            self._turn(State.PLAIN, "no drafts were worth their time of late")

    def settle(self, now: float, time_s: float, plain_s: float) -> None:
        """A round that verified or drafted took time_s; its tokens would have taken plain_s."""
        if self._state not in (State.SPECULATE, State.RETRY):
            return
        self._num_rounds += 1
        self._gained_s += plain_s - time_s
        self._squares += (plain_s - time_s) ** 2
        self._longest_s = max(self._longest_s, plain_s)
        if self._num_rounds < evidence.FEW:
            return
        mean_square = self._gained_s**2 / self._num_rounds
        # Gains are rare and large: one that did not come yet may be the next.
        error_s = math.sqrt(max(self._squares - mean_square, 0.0) + self._longest_s**2)
        is_over = self._num_rounds >= _MOST_ROUNDS
        if self._gained_s < -_BEYOND_DOUBT * error_s or (is_over and self._gained_s < 0.0):
            self._pause(now)
        elif is_over or (self._state is State.RETRY and self._gained_s > error_s):
            self._backoff_s = _FIRST_BACKOFF_S
            if self._state is State.RETRY:
                self._turn(State.SPECULATE, "drafts gain time again")
            self._count_anew()

    def _pause(self, now: float) -> None:
        if self._state is State.RETRY:
            self._backoff_s = min(2.0 * self._backoff_s, _LAST_BACKOFF_S)
        self._paused_until = now + self._backoff_s
        lost_ms = -1000.0 * self._gained_s
        why = f"{self._num_rounds} rounds lost {lost_ms:.1f} ms; next try in {self._backoff_s:g} s"
        self._turn(State.PAUSE, why)

    def _turn(self, state: State, why: str) -> None:
        log.info("throttle %s: %s -> %s, %s", self._name, self._state.value, state.value, why)
        self._state = state
        self._count_anew()

    def _count_anew(self) -> None:
        self._num_rounds = 0
        self._gained_s = 0.0
        self._squares = 0.0
        self._longest_s = 0.0
