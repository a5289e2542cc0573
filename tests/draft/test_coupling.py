from __future__ import annotations

import numpy as np
import pytest

from cluster.core import SamplingParams
from cluster.draft.coupling import COUNT_TRUST, count_conditionals
from cluster.draft.lookups import HitRates


@pytest.mark.parametrize(("trust", "error"), [(1.0, 0.02), (COUNT_TRUST, 0.04)])
@pytest.mark.parametrize("hit_rate", [0.2, 0.7, 0.97])
def test_sampled_conditionals_average_to_the_hit_rate(
    hit_rate: float, trust: float, error: float
) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    sums = [
        sum(count_conditionals(params, position, [11, 12], [3, 1], hit_rate, trust))
        for position in range(4000)
    ]
    assert max(sums) < 1.0
    assert np.mean(sums) == pytest.approx(hit_rate, abs=error)


def test_hit_rates_follow_experience_and_stay_inside_the_unit_interval() -> None:
    rates = HitRates()
    before = rates.rate(2)
    assert rates.rate(1) < before < rates.rate(8)
    for _ in range(5000):
        rates.record(2, hit=True)
        rates.record(3, hit=False)
    assert before < rates.rate(2) < 1.0
    assert 0.0 < rates.rate(3) < 0.1
    for _ in range(5000):
        rates.record(2, hit=False)
    assert rates.rate(2) < 0.1, "old experience fades"
