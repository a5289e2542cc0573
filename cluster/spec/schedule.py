"""Pure functions of draft-length schedules: what follows from a text's steps, and at which times.

See `cluster.config.draft_length` for the kinds, and `cluster.plan.draft_length` for their use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cluster.config.draft_length import (
    DraftLengthConfig,
    DraftLengthOverride,
    days_of,
    minutes_of,
)

# For each kind that follows a text, its bounds where the configuration names none; None = what the
# text may have.
BOUNDS: dict[str, tuple[int, int | None]] = {"heuristic": (1, None), "window": (3, 12)}


def first_len(settings: DraftLengthConfig, most: int) -> int:
    """Return the draft length of a text's first step.  most: what the text may have."""
    return _bounded(settings, settings.num_tokens, most)


def next_len(
    settings: DraftLengthConfig, draft_len: int, fates: Sequence[tuple[int, int]], most: int
) -> int:
    """Return a text's draft length after a step with drafts, which was draft_len before.

    fates: of its latest steps with drafts, the newest last: accepted tokens, and the tree's depth.
    """
    if settings.kind == "heuristic":
        accepted, depth = fates[-1]
        draft_len += 2 if accepted == depth else -1
    else:
        share = sum(accepted for accepted, _ in fates) / sum(depth for _, depth in fates)
        draft_len += (share > settings.raise_above) - (share < settings.lower_below)
    return _bounded(settings, draft_len, most)


def _bounded(settings: DraftLengthConfig, draft_len: int, most: int) -> int:
    least, greatest = BOUNDS[settings.kind]
    upper = min(settings.max_tokens or greatest or most, most)
    return min(max(draft_len, settings.min_tokens or least), upper)


@dataclass(frozen=True, slots=True)
class Rule:
    """An override with its times read.  minutes: first of the day, and first one after."""

    override: DraftLengthOverride
    minutes: tuple[int, int] | None
    days: frozenset[int] | None

    @classmethod
    def of(cls, override: DraftLengthOverride) -> Rule:
        return cls(
            override,
            minutes_of(override.hours) if override.hours else None,
            days_of(override.days) if override.days else None,
        )

    def holds_at(self, local: datetime | None) -> bool:
        """True at that time of the clock on the wall; at an unknown time no hours and days hold."""
        if self.minutes is None and self.days is None:
            return True
        if local is None or (self.days is not None and local.weekday() not in self.days):
            return False
        if self.minutes is None:
            return True
        (start, end), minute = self.minutes, local.hour * 60 + local.minute
        return start <= minute < end if start < end else not end <= minute < start

    def is_for(self, latency_class: str, task: str, num_sequences: int) -> bool:
        """True for such a text in a step of so many."""
        rule = self.override
        return (
            num_sequences >= rule.load_from
            and rule.latency_class in ("", latency_class)
            and rule.task in ("", task)
        )
