"""Measures in production what drafts bring: now and then a window without any, for all texts.

Texts with and without drafts in one batch change each other's steps, so a comparison of requests
side by side is biased.  In a window everybody is plain; it is compared with the time around it.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.present import Answered
from cluster.core import Clock
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

    def __init__(self, config: Config, recorder: Recorder, wall: Clock = time.time) -> None:
        """wall: seconds since the epoch, by which the windows of all coordinators are the same."""
        self._recorder = recorder
        self._wall = wall
        self._ratios: deque[float] = deque(maxlen=_MAX_WINDOWS)
        self.use(config)

    def use(self, config: Config) -> None:
        """Go on by another configuration; windows that are not judged yet are forgotten."""
        settings = config.coordinator.switchback
        self._period_s, self._window_s = int(settings.period_s), int(settings.window_s)
        # By window, and whether it is the time in it: tokens of texts that may have drafts, and the
        # time that these waited.
        self._sums: defaultdict[tuple[int, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])

    @property
    def is_plain_now(self) -> bool:
        """True in a window."""
        return self._period_s > 0 and self._since_switch() >= 0.0

    def _since_switch(self) -> float:
        """Return the seconds since the window at the end of this period began."""
        return self._wall() % self._period_s - self._period_s + self._window_s

    def hear(self, answers: Sequence[Answered]) -> None:
        """Note the verdicts of texts that may have drafts."""
        for each in answers:
            if each.session.text.max_draft_tokens and each.former_at is not None:
                self.note(len(each.verdict.token_ids), each.at - each.former_at)

    def note(self, num_tokens: int, wait_s: float) -> None:
        """Note tokens of a running text that have come, and the time since those before them."""
        if not self._period_s:
            return
        since, around_s = self._since_switch(), _AROUND * self._window_s
        arm = "plain_windows" if since >= 0.0 else "drafts"
        self._recorder.add(metrics.ARM_TOKENS, num_tokens, arm=arm)
        self._recorder.add(metrics.ARM_SECONDS, wait_s, arm=arm)
        after_s = since + self._period_s - self._window_s - _SETTLE_S  # the former window
        number = int(self._wall()) // self._period_s - (after_s < around_s)
        if since >= _SETTLE_S or -around_s <= since < 0.0 or 0.0 <= after_s < around_s:
            sums = self._sums[number, since >= 0.0]
            sums[0] += num_tokens
            sums[1] += wait_s

    def tick(self) -> None:
        """Judge windows, once the time after them is over; called twice a second."""
        if not self._period_s:
            return
        end = self._wall() - _AROUND * self._window_s - _SETTLE_S
        last = int(end) // self._period_s - 1
        for number in sorted({number for number, _ in self._sums if number <= last}):
            drafted, plain = (self._speed(number, is_plain=each) for each in (False, True))
            if not drafted or not plain:
                continue
            self._ratios.append(drafted / plain)
            found = Interval.of_ratios([self._ratios])
            for bound in ("mean", "low", "high"):
                if (value := getattr(found, bound)) is not None:
                    self._recorder.set(metrics.SWITCHBACK_SPEEDUP, value, bound=bound)

    def _speed(self, number: int, *, is_plain: bool) -> float:
        """Forget one side of a window.  Returns the tokens per second of a running text there; 0 =
        too few to tell."""
        num_tokens, wait_s = self._sums.pop((number, is_plain), (0.0, 0.0))
        return num_tokens / wait_s if num_tokens >= _MIN_TOKENS and wait_s > 0.0 else 0.0
