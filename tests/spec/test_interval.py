"""Means and leads come with Student's interval, and with the error of whole stretches."""

import math

import pytest

from cluster.spec.interval import Interval
from cluster.spec.trials import lead_of, moments


def test_an_interval_is_students_about_the_mean():
    found = Interval.of_strata([[1.0, 2.0, 3.0, 6.0]])
    half = 3.182 * math.sqrt((4.0 + 1.0 + 0.0 + 9.0) / 3.0 / 4.0)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))
    assert Interval.of_strata([[5.0]]) == Interval(5.0, None, None, 1)


def test_strata_vary_about_means_of_their_own_and_ratios_by_their_logarithms():
    found = Interval.of_strata([[1.0, 3.0], [11.0, 13.0]])
    half = 4.303 * math.sqrt(2.0 / 2.0 + 2.0 / 2.0) / 2.0
    assert (found.mean, found.low, found.high) == pytest.approx((7.0, 7.0 - half, 7.0 + half))
    assert Interval.of_ratios([[0.5, 2.0], [3.0, 3.0]]).mean == pytest.approx(math.sqrt(3.0))


def test_a_lead_has_the_error_of_stretches_that_differ():
    # What both have of the text alike tells nothing of the lead.
    alike = moments((10.0, 30.0, 10.0, 25.0)) + moments((10.0, 10.0, 10.0, 5.0))
    assert lead_of(alike) == pytest.approx((0.5, 0.0), abs=1e-6)
    apart = moments((10.0, 30.0, 10.0, 15.0)) + moments((10.0, 10.0, 10.0, 15.0))
    # Each stretch is off by 10 tokens of 20 places.
    assert lead_of(apart) == pytest.approx((0.5, math.sqrt(2.0) * 10.0 / 20.0))
