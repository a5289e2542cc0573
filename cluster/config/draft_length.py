"""The section of the schedules that lower draft lengths, and the times of day and week in it."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

from cluster.config.parse import NonNegativeInt, PositiveInt, Readable, Share
from cluster.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = r"([01]?[0-9]|2[0-4])(?::([0-5][0-9]))?"
_HOURS = re.compile(f"{_TIME}-{_TIME}")


def minutes_of(hours: str) -> tuple[int, int]:
    """Return the first minute of a day in such hours and the first one after them.

    The end is below the start where the hours go beyond midnight.  Raises ValueError for another
    form.
    """
    found = _HOURS.fullmatch(hours)
    if found is None:
        raise ValueError("send two times of day as in 09-18 or 22:30-06")
    start, end = (int(found[hour]) * 60 + int(found[hour + 1] or 0) for hour in (1, 3))
    if max(start, end) > 24 * 60 or start == end:
        raise ValueError("the two times of day must differ, and none is beyond 24:00")
    return start, end


def days_of(days: str) -> frozenset[int]:
    """Return the days of the week, Monday = 0.  Raises ValueError for another form."""
    found: set[int] = set()
    for part in days.split(","):
        names = part.strip().split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            raise ValueError(f"send days as in mon-fri or sat,sun; known are {', '.join(DAYS)}")
        start, end = DAYS.index(names[0]), DAYS.index(names[-1])
        found.update(day % 7 for day in range(start, end + 1 + 7 * (end < start)))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class DraftLengthOverride:
    """A rule for some hours, loads and requests: all of its conditions must hold."""

    hours: Annotated[str, Readable("hours", minutes_of)] = ""
    """Hours of the day as in 09-18 or 22:30-06, the end excluded; empty = all."""
    days: Annotated[str, Readable("days", days_of)] = ""
    """Days of the week as in mon-fri or sat,sun; empty = all. It is the moment's own day: a night
    belongs to two."""
    load_from: NonNegativeInt = 0
    """From so many sequences in a step on."""
    latency_class: str = field(default="", metadata={"key": "class"})
    """Requests of this coordinator.latency_classes; empty = all."""
    task: str = ""
    """Requests of this task class; empty = all."""
    max_draft_tokens: NonNegativeInt = 0
    """Draft tokens that one step may then verify per sequence."""


@dataclass(frozen=True, slots=True)
class DraftLengthConfig:
    """Schedules that lower how many draft tokens a step may verify for a sequence. None raises it:
    coordinator.max_draft_tokens and a request's own limit stay above, what pays and what may be
    lost below. See draft-length.md."""

    kind: Literal["adaptive", "constant", "heuristic", "window", "threshold", "alpha"] = "adaptive"
    """adaptive = no further limit. constant = num_tokens. heuristic = 2 more after a step whose
    drafts were accepted to their depth, else 1 fewer. window = 1 more or 1 fewer by the acceptance
    of the latest steps. threshold = only tokens that are probable enough after those before them.
    alpha = no drafts of a drafter for a task class in which too few of its best tokens are
    accepted."""
    num_tokens: NonNegativeInt = 5
    """constant: so many. heuristic, window: those of a text's first step."""
    min_tokens: PositiveInt | None = None
    """heuristic, window: never fewer; null = 1 and 3."""
    max_tokens: PositiveInt | None = None
    """heuristic, window: never more; null = coordinator.max_draft_tokens and 12."""
    num_steps: PositiveInt = 10
    """window: the steps with drafts that count."""
    raise_above: Share = 0.9
    """window: 1 more where a greater share of their depth was accepted, ..."""
    lower_below: Share = 0.6
    """... 1 fewer where a smaller one was."""
    threshold: Share = 0.4
    """threshold: the least probability, calibrated, that a token follows those before it."""
    stop_below: Share = 0.5
    """alpha: the acceptance of a drafter's best token below which it rests, ..."""
    return_at: Share = 0.6
    """... and at which it returns. It is tried in one step of 64 meanwhile."""
    time_zone: Annotated[str, Readable("time zone", zoneinfo.ZoneInfo)] = ""
    """Of the hours and days below, as in Europe/Berlin; empty = that of the target's machine."""
    overrides: tuple[DraftLengthOverride, ...] = ()
    """The first rule that fits a sequence lowers its limit further."""

    def check(self, classes: Collection[str], tasks: Collection[str]) -> None:
        """Raise ConfigError for a rule of a class or task that there is not."""
        path = "coordinator.draft_length"
        if self.return_at < self.stop_below:
            reason = f"{self.return_at:g} is below stop_below, {self.stop_below:g}; raise it"
            raise ConfigError.at(f"{path}.return_at", reason)
        for place, rule in enumerate(self.overrides):
            for key, name, known in (("class", rule.latency_class, classes),
                                     ("task", rule.task, tasks)):  # fmt: skip
                if name and name not in known:
                    reason = f"{name!r} is no {key}; known are: {', '.join(known) or 'none'}"
                    raise ConfigError.at(f"{path}.overrides[{place}].{key}", reason)
