"""Measures in production what drafts bring: now and then a window without any, for all texts.

Texts with and without drafts in one batch change each other's steps, so a comparison of requests
side by side is biased.  In a window everybody is plain; it is compared with the time around it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.events import Answered
from cluster.metrics.recorder import Recorder
from cluster.spec.interval import Interval

# Until targets know of a switch, and the steps that were under way are over.
_SETTLE_S = 2
# Plain time is compared with so many times as much before it, and after it.
_AROUND = 2
# Fewer tokens tell of few texts, not of drafts.
_MIN_TOKENS = 100
_MAX_WINDOWS = 64


class Switchback:
    """Says when windows are, and keeps the speeds in them and around them."""

    def __init__(
        self, config: Config, recorder: Recorder, wall: Callable[[], float] = time.time
    ) -> None:
        """wall: seconds since the epoch, by which the windows of all coordinators are the same."""
        self._recorder = recorder
        self._wall = wall
        # Of each second: tokens of texts that may have drafts, and the time that these waited.
        self._tokens: Counter[int] = Counter()
        self._waits: defaultdict[int, float] = defaultdict(float)
        self._ratios: deque[float] = deque(maxlen=_MAX_WINDOWS)
        self._judged = 0  # end of the last window that was
        self.use(config)

    def use(self, config: Config) -> None:
        """Go on by another configuration; what was measured by another one is forgotten."""
        settings = config.coordinator.switchback
        self._period_s, self._window_s = int(settings.period_s), int(settings.window_s)
        self._tokens.clear()
        self._waits.clear()

    @property
    def is_plain_now(self) -> bool:
        """True in a window."""
        return self._is_plain(self._wall())

    def hear(self, answers: Sequence[Answered]) -> None:
        """Note the verdicts of texts that may have drafts."""
        for each in answers:
            if each.session.text.max_draft_tokens and each.former_at is not None:
                self.note(len(each.verdict.token_ids), each.at - each.former_at)

    def note(self, num_tokens: int, wait_s: float) -> None:
        """Note tokens of a running text that have come, and the time since those before them."""
        if not self._period_s:
            return
        at = self._wall()
        arm = "plain_windows" if self._is_plain(at) else "drafts"
        self._recorder.add(metrics.ARM_TOKENS, num_tokens, arm=arm)
        self._recorder.add(metrics.ARM_SECONDS, wait_s, arm=arm)
        self._tokens[int(at)] += num_tokens
        self._waits[int(at)] += wait_s

    def tick(self) -> None:
        """Judge the last window, once the time after it is over; called twice a second."""
        if not self._period_s:
            return
        around = _AROUND * self._window_s + _SETTLE_S
        end = int(self._wall() - around) // self._period_s * self._period_s
        if end == self._judged:
            return
        self._judged = end
        start = end - self._window_s
        plain = self._speed(range(start + _SETTLE_S, end))
        before = range(start - _AROUND * self._window_s, start)
        drafted = self._speed([*before, *range(end + _SETTLE_S, end + around)])
        for second in [each for each in self._tokens if each < end]:
            del self._tokens[second], self._waits[second]
        if plain and drafted:
            self._ratios.append(drafted / plain)
            found = Interval.of_ratios([self._ratios])
            for bound in ("mean", "low", "high"):
                if (value := getattr(found, bound)) is not None:
                    self._recorder.set(metrics.SWITCHBACK_SPEEDUP, value, bound=bound)

    def _is_plain(self, at: float) -> bool:
        return self._period_s > 0 and at % self._period_s >= self._period_s - self._window_s

    def _speed(self, seconds: Sequence[int]) -> float:
        """Tokens per second of a running text; 0 = too few to tell."""
        num_tokens = sum(self._tokens[each] for each in seconds)
        wait_s = sum(self._waits[each] for each in seconds)
        return num_tokens / wait_s if num_tokens >= _MIN_TOKENS and wait_s > 0.0 else 0.0
