"""A target's own step times by rows: what they say of numbers of nodes nobody has tried."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.spec.step_profile import StepProfile

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
        ((0, 1), (0.1, 0.2)),
        ((1, 2, 2), (0.1, 0.2, 0.3)),
        ((1, 2), (-0.1, 0.2)),
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


def test_beyond_them_two_neighbours_that_measured_alike_do_not_count_alone() -> None:
    noisy = StepProfile.of((1, 32, 48, 64), (0.010, 0.020, 0.040, 0.040))
    assert noisy is not None
    assert noisy.at([128]).tolist() == pytest.approx([0.080])


def test_more_rows_never_take_less() -> None:
    noisy = StepProfile.of((1, 2, 4, 8), (0.010, 0.013, 0.011, 0.014))
    assert noisy is not None
    assert noisy.times_s == pytest.approx((0.010, 0.012, 0.012, 0.014))
