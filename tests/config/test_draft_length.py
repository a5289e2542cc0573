"""The section of draft-length schedules: its times of day and week, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.draft_length import days_of, minutes_of
from cluster.config.parse import parse
from cluster.config.schema import Config
from cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("hours", "minutes"),
    [
        ("09-18", (540, 1080)),
        ("9:30-18:15", (570, 1095)),
        ("22-06", (1320, 360)),
        ("0-24", (0, 1440)),
        ("24-6", (1440, 360)),
    ],
)
def test_hours_are_minutes_of_the_day(hours: str, minutes: tuple[int, int]) -> None:
    assert minutes_of(hours) == minutes


@pytest.mark.parametrize(
    ("days", "numbers"),
    [
        ("mon", {0}),
        ("mon-fri", {0, 1, 2, 3, 4}),
        ("sat,sun", {5, 6}),
        ("fri-mon, wed", {4, 5, 6, 0, 2}),
        ("sun-sat", set(range(7))),
    ],
)
def test_days_are_counted_from_monday(days: str, numbers: set[int]) -> None:
    assert days_of(days) == numbers


def section(**fields: Any) -> dict[str, Any]:
    return {"target": {"engine": {"model": "m"}}, "coordinator": {"draft_length": fields}}


def override(**fields: Any) -> dict[str, Any]:
    return section(overrides=[{}, fields])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (section(kind="fast"), "draft_length.kind: 'fast' is none of: adaptive, constant"),
        (section(threshold=1.5), "draft_length.threshold: 1.5 is out of range"),
        (section(return_at=0.4), "draft_length.return_at: 0.4 is below stop_below, 0.5; raise it"),
        (section(time_zone="Mars/Base"), "draft_length.time_zone: 'Mars/Base' is no time zone"),
        (section(time_zone="Europe"), "draft_length.time_zone: 'Europe' is no time zone"),
        (section(time_zone="../etc"), "draft_length.time_zone: '../etc' is no time zone"),
        (override(hours="9"), "overrides[1].hours: '9' is no hours: send two times of day"),
        (override(hours="09-09"), "overrides[1].hours: '09-09' is no hours: the two times"),
        (override(hours="10-24:30"), "overrides[1].hours: '10-24:30' is no hours: the two times"),
        (override(hours="25-26"), "overrides[1].hours: '25-26' is no hours: send two times"),
        (override(days="monday"), "overrides[1].days: 'monday' is no days: send days as in"),
        (override(days="mon-"), "overrides[1].days: 'mon-' is no days: send days as in"),
        (override(load_from=-1), "overrides[1].load_from: -1 is out of range"),
        (override(latency_class="x"), "overrides[1].latency_class: unknown key (did you mean"),
        (
            override(**{"class": "urgent"}),
            "overrides[1].class: 'urgent' is no class; known are: throughput, interactive",
        ),
        (override(task="code"), "overrides[1].task: 'code' is no task; known are: default"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Config, data).check()
    assert message in caught.value.message


def test_a_whole_section_is_read() -> None:
    rule = {"hours": "09-18", "days": "mon-fri", "load_from": 8, "class": "interactive",
            "task": "default", "max_draft_tokens": 2}  # fmt: skip
    settings = {"kind": "window", "time_zone": "Europe/Berlin", "overrides": [rule]}
    config = parse(Config, section(**settings))
    config.check()
    (found,) = config.coordinator.draft_length.overrides
    assert (found.latency_class, found.load_from, found.max_draft_tokens) == ("interactive", 8, 2)
