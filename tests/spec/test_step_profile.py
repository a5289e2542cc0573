"""A target's own step times by rows: what they say of numbers of nodes nobody has tried."""

import functools

import numpy as np
import pytest

from cluster.spec import step_profile
from cluster.spec.step_profile import DraftTime, MeasuredCosts, StepProfile


@pytest.mark.parametrize(
    ("rows", "times_s"),
    [
        ((), ()),
        ((1,), (0.1,)),
        ((1, 2), (0.1,)),
        ((0, 1), (0.1, 0.2)),
        ((1, 2, 2), (0.1, 0.2, 0.3)),
        ((1, 2), (0.0, 0.2)),
        ((1, 2), (0.1, float("inf"))),
        ((1, 2), (0.1, float("nan"))),
    ],
)
def test_what_is_no_profile_is_none(rows: tuple[int, ...], times_s: tuple[float, ...]):
    assert StepProfile.of(rows, times_s) is None


def test_two_points_are_a_profile():
    found = StepProfile.of([1, 2], [0.5, 2.0])
    assert found == StepProfile((1, 2), (0.5, 2.0))
    assert found.at([1, 2, 3]).tolist() == [0.5, 2.0, 3.5]
    assert found.at([1, 2, 3]).dtype == np.float64


def test_between_sizes_it_is_interpolated_and_beyond_them_it_goes_on():
    # A staircase with an edge behind 24 rows.
    found = StepProfile.of((1, 8, 16, 24, 28, 64), (0.010, 0.010, 0.012, 0.012, 0.024, 0.048))
    expected = [0.010, 0.010, 0.011, 0.018, 0.048, 0.072]
    np.testing.assert_allclose(found.at([1, 4, 12, 26, 64, 100]), expected)


def test_beyond_them_two_neighbours_that_measured_alike_do_not_count_alone():
    noisy = StepProfile.of((1, 32, 48, 64), (0.010, 0.020, 0.040, 0.040))
    assert noisy.at([128]).tolist() == pytest.approx([0.080])
    # Of these, all are in the upper half.
    assert StepProfile.of((6, 8, 9), (1.0, 1.0, 4.0)).at([12]).tolist() == [7.0]


def test_more_rows_never_take_less():
    noisy = StepProfile.of((1, 2, 4, 8), (0.010, 0.013, 0.011, 0.014))
    assert noisy.times_s == pytest.approx((0.010, 0.012, 0.012, 0.014))


# What drafts should bring: formulas against what they stand for, and the measured curve.


PROFILE = StepProfile.of((1, 2, 16, 32), (0.010, 0.010, 0.010, 0.020))


def test_the_formulas_are_those_of_their_sources():
    assert step_profile.accepted_share(0.8, 4) == pytest.approx(0.59, abs=0.001)
    assert step_profile.accepted_share(1.0, 4) == 1.0
    assert step_profile.by_guide(0.8, 4) == pytest.approx(4.2 / 1.8)
    assert step_profile.by_leviathan(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
    assert step_profile.by_leviathan(0.8, 5, 0.1) == pytest.approx(3.689 / 1.5, abs=0.001)


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_by_leviathan_drafts_pay_from_an_acceptance_above_their_cost(cost: float):
    """Corollary 3.9 of the paper: where a > c there is a length that pays, k = 1 among them."""
    curve = functools.partial(step_profile.by_leviathan, cost=cost)
    found = step_profile.break_even(curve)
    assert found == pytest.approx(cost, abs=1e-4)
    assert step_profile.best_length(curve, cost - 0.01) == 0
    assert step_profile.best_length(curve, cost + 0.02) >= 1
    assert step_profile.break_even(functools.partial(step_profile.by_leviathan, cost=1.1)) is None


def test_by_the_measured_curve_a_step_costs_its_rows_and_its_drafts():
    times = (
        DraftTime(1, 2, "lm", False, 0.001),
        DraftTime(1, 8, "lm", False, 0.007),
        DraftTime(1, 2, "suffix", True, 0.001),
        DraftTime(1, 8, "lm", False, 0.9, num_read=1),
    )
    one = MeasuredCosts(PROFILE, times).speedup(1, with_models=True)
    # Four drafts in a step that takes no longer, and 4 ms for them.
    assert one(0.8, 4) == pytest.approx(step_profile.expected_tokens(0.8, 4) * 10 / 14)
    four = MeasuredCosts(PROFILE).speedup(4, with_models=True)
    # 4 * 8 rows take twice as long; no time was measured for drafts, so they cost none.
    assert four(1.0, 7) == pytest.approx(4)
    assert step_profile.best_length(four, 0.5) == 3, "up to the edge of the staircase"
    # Look-ups take another time, here of one measured turn alone; 16 rows at a time are full.
    look_ups = MeasuredCosts(PROFILE, times).speedup(16, with_models=False)
    assert look_ups(0.9, 1) == pytest.approx(1.9 * 10 / 21)
    assert step_profile.break_even(look_ups) is None


def test_a_chain_takes_as_many_steps_of_the_draft_model_as_it_has_tokens():
    gave_up = (DraftTime(1, 2, "lm", False, 0.002), DraftTime(1, 8, "lm", False, 0.002))
    drafter = StepProfile.of((1, 2, 16), (0.001, 0.001, 0.002))
    costs = MeasuredCosts(PROFILE, gave_up, [drafter], outside_s=0.002)
    one = costs.speedup(1, with_models=True)
    assert one(1.0, 4) == pytest.approx(5 * 12 / (10 + 2 + 4))
    # Look-ups alone run no model.
    assert costs.speedup(1, with_models=False)(1.0, 4) == pytest.approx(5)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4, 8])
def test_the_time_of_a_turn_is_on_the_line_through_those_measured_beside_it(wanted: int):
    expected = {0: 0.0, 1: 1.0, 2: 4.0, 3: 10.0, 4: 16.0, 8: 40.0}[wanted]
    by_nodes = [DraftTime(3, count, "lm", False, count**2.0) for count in (4, 1, 2)]
    by_texts = [DraftTime(count, 3, "lm", False, count**2.0) for count in (4, 1, 2)]
    for turns, *given in ((by_nodes, 3, wanted), (by_texts, wanted, 3), (by_nodes, 5, wanted)):
        costs = MeasuredCosts(PROFILE, turns)
        assert costs.draft_s(*given, with_models=True) == expected
        assert costs.draft_s(*given, with_models=False) == 0.0
