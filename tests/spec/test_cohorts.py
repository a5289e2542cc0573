"""One cohort or two, by the measured curve."""

from __future__ import annotations

import pytest

from cluster.spec.cohorts import CohortChoice
from cluster.spec.step_profile import StepProfile

ROWS = (1, 2, 4, 8, 16, 32, 64)
MEMORY_BOUND = StepProfile(ROWS, (0.010,) * 5 + (0.011, 0.013))
COMPUTE_BOUND = StepProfile(ROWS, tuple(0.001 + 0.0005 * rows for rows in ROWS))
OUTSIDE_S = 0.003


def play(
    choice: CohortChoice, profile: StepProfile, rows: int, outside_s: float, rounds: int = 64
) -> int:
    """Rounds of a target of that curve, all of whose sequences have so many rows together."""
    for _ in range(rounds):
        own = rows // choice.num_cohorts
        choice.record(own // 2, own - own // 2, float(profile.at([own])[0]), outside_s)
    return choice.num_cohorts


def test_memory_bound_steps_are_not_divided() -> None:
    assert play(CohortChoice(MEMORY_BOUND), MEMORY_BOUND, 32, OUTSIDE_S) == 1


def test_compute_bound_steps_are_where_that_hides_something() -> None:
    # By turns 2 * 17 ms instead of 33 + 3.
    assert play(CohortChoice(COMPUTE_BOUND), COMPUTE_BOUND, 64, OUTSIDE_S) == 2
    assert play(CohortChoice(COMPUTE_BOUND), COMPUTE_BOUND, 64, 0.0) == 1, (
        "there is nothing to hide"
    )


def test_the_choice_follows_the_load_there_and_back() -> None:
    choice = CohortChoice(COMPUTE_BOUND)
    assert play(choice, COMPUTE_BOUND, 64, OUTSIDE_S) == 2
    assert play(choice, COMPUTE_BOUND, 64, OUTSIDE_S) == 2, "two cohorts do not look like few rows"
    assert play(choice, COMPUTE_BOUND, 64, 0.0005, rounds=256) == 1
    assert play(choice, COMPUTE_BOUND, 64, OUTSIDE_S, rounds=256) == 2


def test_a_target_that_is_slower_than_its_profile_is_judged_by_what_it_takes() -> None:
    """Ten times as slow, the same time outside is a tenth of the gain."""
    slow = StepProfile(ROWS, tuple(10.0 * time_s for time_s in COMPUTE_BOUND.times_s))
    assert play(CohortChoice(COMPUTE_BOUND), slow, 64, OUTSIDE_S) == 1


def test_without_a_curve_there_is_one() -> None:
    assert play(CohortChoice(None), COMPUTE_BOUND, 64, OUTSIDE_S) == 1


# ---- By hand: R rows take 1 + R seconds, so one cohort takes 1 + R + o and two max(2 + R, 1 + R/2
# + o).  Two must be faster by 3 % to be taken: o > 1.06 + 0.03 R, and o < 32.3 R - 66.7.
LINEAR = StepProfile((1, 64), (2.0, 65.0))


def steady(choice: CohortChoice, rows: int, outside_s: float, rounds: int) -> int:
    for _ in range(rounds):
        choice.record(rows // 2, rows - rows // 2, 1.0 + rows, outside_s)
    return choice.num_cohorts


@pytest.mark.parametrize(
    ("outside_s", "expected"), [(1.35, 1), (1.37, 2), (150.0, 2), (200.0, 1), (0.0, 1)]
)
def test_two_are_taken_where_they_are_faster_by_the_margin(outside_s: float, expected: int) -> None:
    assert steady(CohortChoice(LINEAR), 10, outside_s, 32) == expected


def test_it_decides_every_32_rounds() -> None:
    choice = CohortChoice(LINEAR)
    assert steady(choice, 10, 1.5, 31) == 1
    assert steady(choice, 10, 1.5, 1) == 2
    assert steady(choice, 5, 0.0, 31) == 2
    assert steady(choice, 5, 0.0, 1) == 1


def test_two_are_kept_while_they_are_faster_at_all() -> None:
    choice = CohortChoice(LINEAR)
    steady(choice, 10, 1.5, 32)
    assert steady(choice, 5, 1.01, 32 * 20) == 2  # halves of the same ten rows
    assert steady(choice, 5, 0.99, 32 * 20) == 1


def test_single_rows_and_single_rounds_count_for_what_they_are() -> None:
    choice = CohortChoice(LINEAR)
    steady(choice, 1, 1.35, 32)
    assert steady(choice, 10, 1.35, 32) == 2, "in the mean there were some eight rows"
    choice = CohortChoice(LINEAR)
    steady(choice, 10, 1.30, 31)
    assert steady(choice, 2, 1.30, 1) == 1, "one small round is not the load"


def test_rounds_without_rows_do_not_count() -> None:
    choice = CohortChoice(LINEAR)
    steady(choice, 0, 1.5, 100)
    assert steady(choice, 10, 1.5, 31) == 1
    assert steady(choice, 10, 1.5, 1) == 2


def test_rows_of_two_cohorts_are_those_of_a_half() -> None:
    """Below five rows a step takes no less: a quarter of the rows would be read for nothing."""
    stairs = StepProfile((1, 5, 64), (6.0, 6.0, 65.0))
    choice = CohortChoice(stairs)
    for rows, rounds in ((10, 32), (5, 64)):
        for _ in range(rounds):
            choice.record(rows, 0, float(stairs.at([rows])[0]), 1.5)
        assert choice.num_cohorts == 2


def test_two_that_are_as_fast_as_one_are_given_up() -> None:
    choice = CohortChoice(LINEAR)
    choice.num_cohorts = 2
    assert steady(choice, 5, 1.0, 32) == 1
