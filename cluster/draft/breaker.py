"""When a drafter is left alone: one rule for the pool, for a target and for the coordinator."""

from __future__ import annotations

import math
from collections import Counter

from cluster.errors import CapacityError, ProtocolError, RequestError, error_from_code
from cluster.records import frozen

# A call that takes so many times the bound of a round, and at least so long, has stalled: a step of
# a draft model, a garbage collection or a core that was busy elsewhere stays below that.
_STALL_FACTOR = 8.0
_LEAST_STALL_S = 0.1
# What stalls may take of the time, beyond what any drafter may once: one that has taken more rests
# until it is no more than this share.
_STALL_SHARE = 0.02
_STALL_SLACK_S = 0.25


@frozen
class Ruling:
    """The consequence of a drafter's refusal of a request.

    fault: its reason where the drafter is at fault, else "".  kept_s: for so long the request is
    kept from the drafter; else its whole text would be sent again after every verdict.
    """

    fault: str
    kept_s: float


def has_stalled(call_s: float, bound_s: float) -> bool:
    """True if a call has taken far too long; bound_s: what all drafters have together."""
    return call_s > max(_STALL_FACTOR * bound_s, _LEAST_STALL_S)


class CircuitBreaker:
    """Closed until `failures` happen in a row; then open for `reset_s`, then on probation.

    On probation the drafter is used again; one more failure opens the breaker at once, one
    success closes it.  Beside that a drafter rests while its stalls have cost more than their
    share.  Times are seconds of any one monotonic clock.  faults: how many there were, by reason.
    """

    def __init__(self, failures: int, reset_s: float) -> None:
        self._limit = max(1, failures)
        self.reset_s = reset_s
        self.faults: Counter[str] = Counter()
        self.reset()

    def reset(self, *, keeps_stalls: bool = False) -> None:
        """Begin afresh.  keeps_stalls: except for what its stalls have cost."""
        self.faults.clear()
        self.record_success()
        if not keeps_stalls:
            self._debt_s = self._debt_at = 0.0

    def rule(self, code: str) -> Ruling:
        """Return what follows from a refusal with this error code."""
        error = error_from_code(code, "")
        if isinstance(error, RequestError):
            return Ruling("", math.inf)  # it cannot serve this very request (say, too long)
        if isinstance(error, CapacityError):
            return Ruling("", self.reset_s)  # nor is anything wrong with one that is full
        return Ruling("rubbish" if isinstance(error, ProtocolError) else "refused", self.reset_s)

    def allows(self, now: float) -> bool:
        """True if the drafter may be used."""
        return not self._is_open(now) and not self._is_resting(now)

    def record_success(self) -> None:
        self._failures_in_a_row = 0
        self._opened_at: float | None = None

    def record_failure(self, why: str, now: float) -> bool:
        """Count one failure.  True when the breaker is open after it."""
        self.faults[why] += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._limit:
            self._opened_at = now
        return self._is_open(now)

    def record_stall(self, stalled_s: float, now: float) -> float:
        """A call has stalled for so long.  Returns for how long the drafter rests."""
        self.faults["stalled"] += 1
        self._debt_s = self._debt(now) + stalled_s
        self._debt_at = now
        return max(self._debt_s - _STALL_SLACK_S, 0.0) / _STALL_SHARE

    def state(self, now: float) -> str:
        """closed | open | probation | resting, for status reports."""
        if self._is_resting(now):
            return "resting"
        if self._opened_at is None:
            return "closed"
        return "open" if self._is_open(now) else "probation"

    def _is_open(self, now: float) -> bool:
        return self._opened_at is not None and now - self._opened_at < self.reset_s

    def _is_resting(self, now: float) -> bool:
        return self._debt_s > 0.0 and self._debt(now) > _STALL_SLACK_S

    def _debt(self, now: float) -> float:
        """Return what stalls have cost beyond their share; it falls as time goes by."""
        return max(self._debt_s - _STALL_SHARE * (now - self._debt_at), 0.0)
