"""Draft-length schedules as pure functions: of a text's history, and of the clock on the wall."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from cluster.config.draft_length import DraftLengthConfig, DraftLengthOverride
from cluster.spec.schedule import Rule, first_len, next_len

MOST = 16


def lens(history: str, **settings: Any) -> list[int]:
    """The draft lengths of a text's steps, from the first on.

    history: of each step with drafts accepted/depth.
    """
    config = DraftLengthConfig(**settings)
    found = [first_len(config, MOST)]
    fates: list[tuple[int, int]] = []
    for step in history.split():
        accepted, _, depth = step.partition("/")
        fates = [*fates, (int(accepted), int(depth))][-config.num_steps :]
        found.append(next_len(config, found[-1], fates, MOST))
    return found


HEURISTIC: Any = {"kind": "heuristic"}
WINDOW: Any = {"kind": "window"}


@pytest.mark.parametrize(
    ("settings", "history", "expected"),
    [
        (HEURISTIC, "5/5 7/7 9/9", [5, 7, 9, 11]),
        (HEURISTIC, "4/5 0/4 0/3 0/2 0/1", [5, 4, 3, 2, 1, 1]),
        (HEURISTIC, "3/3 2/3 3/3", [5, 7, 6, 8]),
        (HEURISTIC, "1/1 " * 7, [5, 7, 9, 11, 13, 15, 16, 16]),
        ({**HEURISTIC, "num_tokens": 0}, "", [1]),
        ({**HEURISTIC, "num_tokens": 99}, "0/9", [16, 15]),
        ({**HEURISTIC, "min_tokens": 4, "max_tokens": 6}, "1/1 0/1 0/1 0/1", [5, 6, 5, 4, 4]),
        (WINDOW, "5/5 6/6 7/7", [5, 6, 7, 8]),
        (WINDOW, "0/5 0/4 0/3", [5, 4, 3, 3]),
        (WINDOW, "3/4 3/4 3/4", [5, 5, 5, 5]),
        (WINDOW, "9/9 " * 9, [5, 6, 7, 8, 9, 10, 11, 12, 12, 12]),
        # One miss in ten steps of one token leaves 0.9, which is not above it.
        ({**WINDOW, "num_tokens": 3}, "1/1 1/1 0/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1",
         [3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6]),
        ({**WINDOW, "num_steps": 1}, "0/4 4/4 2/4 3/4", [5, 4, 5, 4, 4]),
        ({**WINDOW, "raise_above": 0.4, "lower_below": 0.2}, "2/4 1/4 0/4", [5, 6, 6, 6]),
        ({**WINDOW, "min_tokens": 5, "max_tokens": 5}, "4/4 0/9", [5, 5, 5]),
    ],
)  # fmt: skip
def test_the_length_follows_the_history(
    settings: dict[str, Any], history: str, expected: list[int]
) -> None:
    assert lens(history, **settings) == expected


def test_no_length_is_above_what_the_text_may_have() -> None:
    assert first_len(DraftLengthConfig(**HEURISTIC), 2) == 2
    assert next_len(DraftLengthConfig(**HEURISTIC), 2, [(2, 2)], 3) == 3
    assert first_len(DraftLengthConfig(**WINDOW), 0) == 0


BERLIN = ZoneInfo("Europe/Berlin")
# The clock goes from 2 to 3 on the first day, and from 3 back to 2 on the second.
SPRING, AUTUMN = datetime(2026, 3, 29, tzinfo=BERLIN), datetime(2026, 10, 25, tzinfo=BERLIN)


def hours_held(day: datetime, **conditions: Any) -> float:
    """Hours of a day, as they go by, in which a rule holds."""
    rule = Rule.of(DraftLengthOverride(**conditions))
    begin, end = (each.astimezone(UTC) for each in (day, day + timedelta(days=1)))
    quarters = int((end - begin) / timedelta(minutes=15))
    moments = (begin + number * timedelta(minutes=15) for number in range(quarters))
    return sum(rule.holds_at(moment.astimezone(BERLIN)) for moment in moments) / 4


@pytest.mark.parametrize(
    ("hours", "usual", "spring", "autumn"),
    [
        ("02-03", 1, 0, 2),
        ("01-04", 3, 2, 4),
        ("03-04", 1, 1, 1),
        ("22-06", 8, 7, 9),
        ("02:30-02:45", 0.25, 0, 0.5),
        ("0-24", 24, 23, 25),
        ("", 24, 23, 25),
    ],
)
def test_hours_are_those_of_the_clock_on_the_wall_where_it_is_put_back_and_forward(
    hours: str, usual: float, spring: float, autumn: float
) -> None:
    days = (SPRING + timedelta(days=30), SPRING, AUTUMN)
    assert [hours_held(day, hours=hours) for day in days] == [usual, spring, autumn]


def test_a_rule_holds_on_its_days_and_a_night_belongs_to_two() -> None:
    friday = datetime(2026, 11, 27, tzinfo=BERLIN)
    held = [hours_held(friday + timedelta(days=day), hours="22-06", days="fri") for day in (0, 1)]
    assert held == [8, 0]
    assert hours_held(friday, days="sat,sun") == 0
    assert hours_held(friday, days="mon-fri") == 24


@pytest.mark.parametrize("conditions", [{"hours": "0-24"}, {"days": "mon-sun"}])
def test_at_an_unknown_time_only_rules_without_hours_and_days_hold(
    conditions: dict[str, str],
) -> None:
    assert not Rule.of(DraftLengthOverride(**conditions)).holds_at(None)
    assert Rule.of(DraftLengthOverride(load_from=8)).holds_at(None)


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = Rule.of(DraftLengthOverride(load_from=8, latency_class="throughput", task="code"))
    assert rule.is_for("throughput", "code", 8)
    assert not rule.is_for("throughput", "code", 7)
    assert not rule.is_for("interactive", "code", 8)
    assert not rule.is_for("throughput", "default", 8)
    assert Rule.of(DraftLengthOverride()).is_for("", "default", 1)
