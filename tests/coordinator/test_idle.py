"""Why a request had no speculative step."""

from __future__ import annotations

import pytest

from cluster.coordinator.idle import MEANINGS, Availability, IdleReason, PlainSteps, idle_reason

THERE = Availability(num_configured=2, num_usable=1, num_seen=1)


@pytest.mark.parametrize(
    ("drafters", "expected"),
    [
        (Availability(), "no_drafter_for_model"),
        (Availability(num_configured=2, num_refused=2), "no_drafter_for_model"),
        (Availability(num_configured=2, num_refused=1), "warming_up"),
        (Availability(num_configured=2, uptime_s=60.0), "warming_up"),
        (Availability(num_configured=2, uptime_s=180.0), "drafters_down"),
        (Availability(num_configured=2, num_refused=1, uptime_s=180.0), "drafters_down"),
        (Availability(num_configured=2, num_seen=1), "drafters_down"),
        (Availability(num_configured=2, num_seen=1, num_refused=1), "drafters_down"),
    ],
)
def test_without_a_drafter_that_is_why(drafters: Availability, expected: str) -> None:
    assert idle_reason(is_enabled=True, drafters=drafters, steps=PlainSteps()) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (PlainSteps(num_paused=5, num_declined=1, num_without_drafts=2), "paused"),
        (PlainSteps(num_paused=1, num_declined=5, num_without_drafts=2), "not_worth_it"),
        (PlainSteps(num_paused=1, num_declined=2, num_without_drafts=5), "no_drafts"),
        (PlainSteps(num_without_drafts=1), "no_drafts"),
        (PlainSteps(), "too_short"),
    ],
)
def test_with_drafters_it_is_what_happened_in_most_steps(steps: PlainSteps, expected: str) -> None:
    assert idle_reason(is_enabled=True, drafters=THERE, steps=steps) == expected


def test_every_reason_has_a_meaning_of_its_own() -> None:
    assert set(MEANINGS) == set(IdleReason)
    assert len(set(MEANINGS.values())) == len(IdleReason)


def test_a_request_that_wants_no_drafts_has_none_for_that_reason_alone() -> None:
    steps = PlainSteps(num_paused=5)
    assert idle_reason(is_enabled=False, drafters=Availability(), steps=steps) == "disabled"


@pytest.mark.parametrize(
    ("is_paused", "has_drafts", "noted"),
    [
        (True, True, PlainSteps(num_paused=1)),
        (True, False, PlainSteps(num_paused=1)),
        (False, True, PlainSteps(num_declined=1)),
        (False, False, PlainSteps(num_without_drafts=1)),
    ],
)
def test_a_plain_step_has_one_reason(is_paused: bool, has_drafts: bool, noted: PlainSteps) -> None:
    steps = PlainSteps()
    steps.note(is_paused=is_paused, has_drafts=has_drafts)
    assert steps == noted
