"""The circuit breakers of drafters, at the coordinator and inside a target."""

from __future__ import annotations

from collections.abc import Iterator

# A replica that is gone and has not failed for so many times the reset time starts afresh.
_MEMORY_RESETS = 10


class CircuitBreaker:
    """Closed until `failures` happen in a row; then open for `reset_s`, then on probation.

    On probation the replica is used again; one more failure opens the breaker at once, one
    success closes it.  Times are seconds of any one monotonic clock.
    """

    def __init__(self, failures: int, reset_s: float) -> None:
        self._limit = max(1, failures)
        self._reset_s = reset_s
        self._failures_in_a_row = 0
        self._opened_at: float | None = None
        self._failed_at: float | None = None

    def allows(self, now: float) -> bool:
        """Whether the replica may be used."""
        return self._opened_at is None or now - self._opened_at >= self._reset_s

    def record_success(self) -> None:
        self._failures_in_a_row = 0
        self._opened_at = None

    def record_failure(self, now: float) -> bool:
        """Count one failure.  True when the breaker is open after it."""
        self._failures_in_a_row += 1
        self._failed_at = now
        if self._failures_in_a_row >= self._limit:
            self._opened_at = now
        return not self.allows(now)

    def is_history(self, now: float) -> bool:
        """Whether its last failure, if any, lies so far back that it is worth forgetting."""
        return self._failed_at is None or now - self._failed_at >= _MEMORY_RESETS * self._reset_s

    @property
    def is_clean(self) -> bool:
        """No failure since the last success: nothing worth remembering."""
        return self._failures_in_a_row == 0

    def state(self, now: float) -> str:
        """closed | open | probation, for status reports."""
        if self._opened_at is None:
            return "closed"
        return "probation" if self.allows(now) else "open"


class BreakerBook:
    """Breakers by (drafter, replica).  One that a replica's former life opened stays open."""

    def __init__(self, failures: int, reset_s: float) -> None:
        self._failures = failures
        self._reset_s = reset_s
        self._breakers: dict[tuple[str, str], CircuitBreaker] = {}

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._breakers)

    def of(self, name: str, replica_id: str) -> CircuitBreaker:
        """The breaker of a replica, a new one for one that is not known."""
        key = (name, replica_id)
        if key not in self._breakers:
            self._breakers[key] = CircuitBreaker(self._failures, self._reset_s)
        return self._breakers[key]

    def left(self, name: str, replica_id: str) -> None:
        """The replica is gone; its breaker is kept only if there is anything to remember."""
        if self._breakers[(name, replica_id)].is_clean:
            del self._breakers[(name, replica_id)]

    def forget(self, live: set[tuple[str, str]], now: float) -> None:
        """Replicas that restart under new ids would leave one behind each time."""
        for key, breaker in list(self._breakers.items()):
            if key not in live and breaker.is_history(now):
                del self._breakers[key]
