"""A target's own step times by rows: what they say of numbers of nodes nobody has tried."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, SequenceDraft
from cluster.spec.step_profile import StepProfile
from cluster.spec.step_times import EDGES, StepTimes

# A staircase with an edge behind 24 rows.
ROWS = (1, 8, 16, 24, 28, 64)
TIMES_S = (0.010, 0.010, 0.012, 0.012, 0.024, 0.048)


def profile() -> StepProfile:
    found = StepProfile.of(ROWS, TIMES_S)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rows", "times_s"),
    [
        ((), ()),
        ((1,), (0.1,)),
        ((1, 2), (0.1,)),
        ((2, 1), (0.1, 0.2)),
        ((1, 1), (0.1, 0.2)),
        ((0, 1), (0.1, 0.2)),
        ((-1, 1), (0.1, 0.2)),
        ((1, 3, 2), (0.1, 0.2, 0.3)),
        ((1, 2, 2), (0.1, 0.2, 0.3)),
        ((1, 2), (-0.1, 0.2)),
        ((1, 2), (0.1, 0.0)),
        ((1, 2), (0.0, 0.2)),
        ((1, 2), (0.1, float("inf"))),
        ((1, 2), (0.1, float("nan"))),
    ],
)
def test_what_is_no_profile_is_none(rows: tuple[int, ...], times_s: tuple[float, ...]) -> None:
    assert StepProfile.of(rows, times_s) is None


def test_two_points_are_a_profile() -> None:
    found = StepProfile.of([1, 2], [0.5, 2.0])
    assert found == StepProfile((1, 2), (0.5, 2.0))
    assert found.at([1, 2, 3]).tolist() == [0.5, 2.0, 3.5]
    assert found.at([1, 2, 3]).dtype == np.float64


def test_between_sizes_it_is_interpolated_and_beyond_them_it_goes_on() -> None:
    found = profile().at([1, 4, 12, 26, 64, 100])
    np.testing.assert_allclose(found, [0.010, 0.010, 0.011, 0.018, 0.048, 0.072])


def test_more_rows_never_take_less() -> None:
    noisy = StepProfile.of((1, 2, 4, 8), (0.010, 0.013, 0.011, 0.014))
    assert noisy is not None
    assert noisy.times_s == pytest.approx((0.010, 0.012, 0.012, 0.014))


def recorded(times: StepTimes, num_sequences: int, num_nodes: int, time_s: float) -> None:
    for _ in range(3):
        times.record(num_sequences, num_nodes, time_s)


def test_untried_numbers_of_nodes_go_by_the_profiles_ratios() -> None:
    times = StepTimes(profile=profile())
    assert times.estimate(16, 8) is None  # a shape alone is no time
    recorded(times, 16, 0, 0.018)  # half as much again as the profile says
    assert times.estimate(16, 0) == pytest.approx(0.018)
    assert times.estimate(16, 8) == pytest.approx(0.018)
    assert times.estimate(16, 12) == pytest.approx(0.036)
    assert times.estimate(16, 48) == pytest.approx(0.072)
    assert times.high(16, 12) == pytest.approx(0.036)


def test_what_is_measured_counts_and_the_ratio_is_interpolated_from_there() -> None:
    times = StepTimes(profile=profile())
    recorded(times, 16, 0, 0.018)
    recorded(times, 16, 12, 0.030)  # 1.25 times the profile's
    assert times.estimate(16, 12) == pytest.approx(0.030)
    assert times.estimate(16, 48) == pytest.approx(0.060)
    # Alone it would be 0.016; but more nodes never take less.
    assert times.estimate(16, 8) == pytest.approx(0.018)
    assert times.estimate(16, 24) == pytest.approx(0.032 * 1.25)
    found = times.at_edges(16)
    assert found is not None
    assert (np.diff(found) >= 0.0).all()
    assert len(found) == len(EDGES)


def test_an_unmeasured_load_goes_by_another_ones_ratio() -> None:
    times = StepTimes(profile=profile())
    recorded(times, 16, 0, 0.018)
    assert times.estimate(64, 0) == pytest.approx(0.048 * 1.5)
    assert times.estimate(4, 0) == pytest.approx(0.010 * 1.5)


@pytest.mark.parametrize(("known", "expected"), [(profile(), 8), (None, 16)])
def test_the_first_drafts_stop_at_the_edge_of_the_staircase(
    known: StepProfile | None, expected: int
) -> None:
    """Sixteen sequences, whose drafts are good: 8 nodes are free, 16 double the step's time.
    Without a profile that has to be found out by trying."""
    rules = BudgetRules(max_draft_tokens=8, profile=known)
    controller = BudgetController(rules)
    for _ in range(3):
        controller.record(16, 0, 0.018)
    drafts = [SequenceDraft(np.array([0.6, 0.5], np.float32)) for _ in range(16)]
    chosen = controller.choose(drafts)
    assert sum(len(nodes) for nodes in chosen.nodes) == expected


def test_with_a_profile_good_drafts_of_many_need_not_be_found_out_in_doublings() -> None:
    """Sixteen sequences, steps that cost the same whatever they verify: four nodes of each."""
    flat = StepProfile.of((1, 100), (0.010, 0.010))
    controller = BudgetController(BudgetRules(max_draft_tokens=8, profile=flat))
    for _ in range(3):
        controller.record(16, 0, 0.018)
    drafts = [SequenceDraft(np.array([0.9, 0.8, 0.7, 0.6, 0.5], np.float32)) for _ in range(16)]
    assert sum(len(nodes) for nodes in controller.choose(drafts).nodes) == 64
