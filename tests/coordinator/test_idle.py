"""Why a request had no speculative step."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.coordinator.idle import MEANINGS, IdleReason, idle_reason
from cluster.requests.fields import PlainWhy

NOTHING = dict.fromkeys(("num_configured", "num_refused", "num_usable", "num_seen", "uptime_s"), 0)
THERE = NOTHING | {"num_configured": 2, "num_usable": 1, "num_seen": 1}


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        ({}, "no_drafter_for_model"),
        ({"num_configured": 2, "num_refused": 2}, "no_drafter_for_model"),
        ({"num_configured": 2, "num_refused": 1}, "warming_up"),
        ({"num_configured": 2, "uptime_s": 60}, "warming_up"),
        ({"num_configured": 2, "uptime_s": 180}, "drafters_down"),
        ({"num_configured": 2, "num_refused": 1, "uptime_s": 180}, "drafters_down"),
        ({"num_configured": 2, "num_seen": 1}, "drafters_down"),
        ({"num_configured": 2, "num_seen": 1, "num_refused": 1}, "drafters_down"),
    ],
)
def test_without_a_drafter_that_is_why(drafters: dict[str, int], expected: str) -> None:
    assert idle_reason(is_enabled=True, steps=Counter(), **NOTHING | drafters) == expected


@pytest.mark.parametrize(
    ("paused", "not_worth_it", "no_drafts", "expected"),
    [
        (5, 1, 2, "paused"),
        (1, 5, 2, "not_worth_it"),
        (1, 2, 5, "no_drafts"),
        (0, 0, 0, "too_short"),
    ],
)
def test_with_drafters_it_is_what_happened_in_most_steps(
    paused: int, not_worth_it: int, no_drafts: int, expected: str
) -> None:
    steps = Counter(
        {
            PlainWhy.NONE: 100,
            PlainWhy.GUARD: paused,
            PlainWhy.NOT_WORTH_IT: not_worth_it,
            PlainWhy.NO_DRAFTS: no_drafts,
        }
    )
    assert idle_reason(is_enabled=True, steps=steps, **THERE) == expected


def test_every_reason_has_a_meaning_of_its_own() -> None:
    assert set(MEANINGS) == set(IdleReason)
    assert len(set(MEANINGS.values())) == len(IdleReason)


def test_a_request_that_wants_no_drafts_has_none_for_that_reason_alone() -> None:
    steps = Counter({PlainWhy.GUARD: 5})
    assert idle_reason(is_enabled=False, steps=steps, **NOTHING) == "disabled"
