"""Says once a minute, with a count, what comes up many times a second."""

from __future__ import annotations

from collections.abc import Hashable

_PERIOD_S = 60.0
# Of more things that are said the first are forgotten: they may then be said again too soon.
_MAX_KEYS = 256


class OnceAMinute:
    """Times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._said: dict[Hashable, tuple[float, int]] = {}  # when, and how often it came until now

    def is_due(self, key: Hashable, now: float) -> int:
        """Return how often `key` has come, with this time, where it is to be said now; else 0."""
        said_at, count = self._said.get(key, (None, 0))
        is_due = said_at is None or now - said_at >= _PERIOD_S
        if len(self._said) >= _MAX_KEYS and key not in self._said:
            del self._said[next(iter(self._said))]
        self._said[key] = now if said_at is None or is_due else said_at, count + 1
        return count + 1 if is_due else 0
