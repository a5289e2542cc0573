"""Rules of calling again: after how long, and until when.  No I/O: the clients wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from .errors import BusyError, ClientError, DeadlineError, UnavailableError

_FIRST_DELAY_S = 0.1
# Longer than it takes to replace a replica; a server that needs more says so.
_MAX_DELAY_S = 5.0
# Clients that were refused together come back apart.
_JITTER = 0.25


class Retries:
    """Counts the failures in a row of one request."""

    def __init__(self, max_retries: int, jitter: Callable[[], float] = random.random) -> None:
        """max_retries: how many calls in a row may fail without progress; 0 = never call again.

        jitter: uniform in [0, 1).
        """
        self._max_retries = max_retries
        self._jitter = jitter
        self._num_failures = 0

    def progress(self) -> None:
        """Something new was received: failures before it count no more."""
        self._num_failures = 0

    def delay_after(self, error: ClientError, *, is_started: bool = False) -> float:
        """Seconds to wait before the next call; raises `error` if another cannot help.

        is_started: part of the answer is there.  Then a server that is full and says when to come
        back is asked as often as it takes: it is alive, and the part would be lost.
        """
        asked_s = error.retry_after_s
        if error.is_final or not isinstance(error, BusyError | UnavailableError):
            raise error
        is_alive = isinstance(error, BusyError) and asked_s is not None
        if self._max_retries == 0 or not (is_started and is_alive):
            self._num_failures += 1
        if self._num_failures > self._max_retries:
            raise error
        backoff_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** max(0, self._num_failures - 1))
        return max(backoff_s, asked_s or 0.0) * (1.0 + _JITTER * self._jitter())


class Deadline:
    """One time limit shared by all calls of a request."""

    def __init__(self, timeout_s: float | None) -> None:
        """timeout_s: from now; None = no limit."""
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds left, for the next call; raises DeadlineError when there are none."""
        if self._end_s is None:
            return None
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0.0:
            raise DeadlineError("the time that the call allowed is over; allow more by timeout_s")
        return remaining_s

    def checked(self, delay_s: float, error: ClientError) -> float:
        """Return `delay_s`; raise `error` if the deadline comes first."""
        if self._end_s is not None and self._end_s - time.monotonic() <= delay_s:
            raise error
        return delay_s
