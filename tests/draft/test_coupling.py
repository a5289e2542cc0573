from __future__ import annotations

import numpy as np
import pytest

from cluster.core import SamplingParams
from cluster.draft.coupling import COUNT_TRUST, count_conditionals, is_useful
from cluster.draft.hit_rates import HitRates
from cluster.spec.noise import gumbel


def test_greedy_conditionals_share_the_hit_rate_by_counts() -> None:
    shares = count_conditionals(SamplingParams(temperature=0.0), 0, [5, 6], [3, 1], 0.8)
    assert shares == pytest.approx([0.6, 0.2])


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


def test_sampled_conditionals_prefer_the_candidate_that_the_noise_lifts() -> None:
    params = SamplingParams(temperature=1.0, seed=9)
    for position in range(50):
        first, second = count_conditionals(params, position, [1, 2], [1, 1], 0.9)
        noise = gumbel(9, position, [1, 2])
        assert (first > second) == (noise[0] > noise[1])


def test_a_token_that_ends_the_text_is_not_a_useful_draft() -> None:
    params = SamplingParams(max_tokens=10, min_tokens=3, stop_token_ids=(7,))
    assert is_useful(params, 0, 8)
    assert not is_useful(params, 4, 7)
    assert is_useful(params, 2, 7), "before min_tokens a stop token is text like any other"
    assert is_useful(params, 8, 8)
    assert not is_useful(params, 9, 8), "the last token is drawn with or without a draft of it"


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
