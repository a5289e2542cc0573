"""What a resident drafter whose calls stall may take of the target's time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.draft.once_a_minute import OnceAMinute

log = logging.getLogger(__name__)

# A call that takes so many times the bound of a round, and at least so long, has stalled: a step of
# a draft model, a garbage collection or a core that was busy elsewhere stays below that.
_STALL_FACTOR = 8.0
_LEAST_STALL_S = 0.1
# What stalls may take of the target's time, beyond what any drafter may once: one that has taken
# more rests until it is no more than this share.
_STALL_SHARE = 0.02
_STALL_SLACK_S = 0.25


def has_stalled(call_s: float, bound_s: float) -> bool:
    """Whether a call has taken far too long; bound_s: what all residents have together."""
    return call_s > max(_STALL_FACTOR * bound_s, _LEAST_STALL_S)


class StallDebt:
    """What one drafter's stalls have taken beyond their share; it falls as time goes by."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._debt_s = 0.0
        self._known_at = clock()
        self._said = OnceAMinute()

    def is_due(self, now: float) -> bool:
        """Whether the drafter is to rest until it owes less."""
        return self._left_s(now) > _STALL_SLACK_S

    def owe(self, stalled_s: float) -> None:
        """A call has stalled for so long."""
        self._debt_s = self._left_s(self._clock()) + stalled_s
        rests_s = max(self._debt_s - _STALL_SLACK_S, 0.0) / _STALL_SHARE
        if count := self._said.is_due("stalled", self._known_at):
            log.warning(
                "resident drafter stalled name=%s times=%d for_s=%.3f rests_s=%.1f",
                self._name, count, stalled_s, rests_s,
            )  # fmt: skip

    def _left_s(self, now: float) -> float:
        self._debt_s = max(self._debt_s - _STALL_SHARE * (now - self._known_at), 0.0)
        self._known_at = now
        return self._debt_s
