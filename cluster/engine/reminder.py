"""Why something runs more slowly than it could: said in a line, and again and again, so that it is
not lost in a log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

_INTERVAL_S = 600.0
_MAX_LINE = 300


def in_a_line(error: Exception) -> str:
    """The error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MAX_LINE]


class Reminder:
    """A warning for each fallback, every ten minutes in which there are steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due = clock() + _INTERVAL_S  # it was said when it happened

    def tick(self, fallbacks: Callable[[], Sequence[str]]) -> None:
        """To be called in every step."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _INTERVAL_S
        for each in fallbacks():
            log.warning("the GPU serves more slowly than it could: %s", each)
