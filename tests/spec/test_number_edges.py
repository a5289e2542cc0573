"""Sampling numbers at the edges of their type: float32 logits keep a law, whatever they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cluster.core import EMPTY_TREE, SamplingParams, token_array
from cluster.spec.draw import winner_among
from cluster.spec.penalties import Counts, PenalisedRows, TokenBias, penalise
from cluster.spec.sampling import RowLaws, scale, sorted_cutoffs, survivors
from tests.spec.test_draw import drawn, random_logits

CPU = torch.device("cpu")
VOCAB_SIZE = 200
# The least double, below and at the least float32, the least normal ones of both.
TINY = (5e-324, 2.3e-308, 1e-46, 1e-45, 1e-38, 1.2e-38)
HUGE = (1e30, 3.5e38, 1e300)
TRUNCATIONS = tuple(
    {"top_p": top_p, "min_p": min_p, "top_k": top_k}
    for top_p, min_p, top_k in itertools.product(
        (5e-324, 1.0 - 2**-53, 1.0), (0.0, 5e-324, 0.5, 1.0), (0, 1, 2**31 - 1)
    )
)


@pytest.mark.parametrize("temperature", TINY)
def test_a_temperature_that_is_nothing_is_greedy_under_every_truncation(temperature: float) -> None:
    logits = random_logits(1, len(TRUNCATIONS), VOCAB_SIZE)
    params = [SamplingParams(temperature=temperature, seed=3, **more) for more in TRUNCATIONS]
    found = drawn(logits, params, range(len(params)))
    assert (found >= 0).all()
    assert found.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", HUGE)
def test_a_temperature_beyond_all_leaves_every_token_and_no_banned_one(temperature: float) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    law = RowLaws.of([SamplingParams(temperature=temperature)], CPU)
    scaled = scale(logits, logits.amax(1), law.temperature)
    assert scaled.exp().tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("temperature", [*TINY, 1.0, *HUGE])
def test_both_ways_to_find_a_cutoff_agree_at_the_edges(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, **more) for more in TRUNCATIONS]
    laws = RowLaws.of(params, CPU)
    logits = torch.from_numpy(random_logits(2, len(params), VOCAB_SIZE))
    scaled = scale(logits, logits.amax(1), laws.temperature)
    cutoffs = sorted_cutoffs(scaled, laws), survivors(scaled, laws, 5).cutoffs
    kept = [scaled >= each.unsqueeze(1) for each in cutoffs]
    assert torch.equal(*kept)
    assert kept[0].any(dim=1).all()


@pytest.mark.parametrize("temperature", TINY)
def test_near_ties_of_a_tiny_temperature_are_told_apart(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert winner_among(logits, np.array([0, 1, 2]), temperature, (1, 2, 0)) == 1


@pytest.mark.parametrize("penalty", [*TINY, 1e-20, 10.0, *HUGE])
@pytest.mark.parametrize("shift", [-1e300, -2.0, 2.0, 1e300])
def test_penalties_leave_finite_logits_that_are_in_order(penalty: float, shift: float) -> None:
    logits = torch.tensor([[30.0, 31.0, -2.0, 0.0, -torch.inf, 5.0]])
    counts = Counts.of(token_array([0, 1, 2, 3, 4]), token_array([2, 2, 4]), 6, CPU)
    for params in (
        SamplingParams(repetition_penalty=penalty),
        SamplingParams(repetition_penalty=penalty, frequency_penalty=shift),
        SamplingParams(repetition_penalty=penalty, presence_penalty=shift),
    ):
        row = logits.clone()
        penalise(row, [PenalisedRows(0, counts, params, EMPTY_TREE)])
        values = row[0]
        assert not values.isnan().any()
        assert values[4] == -torch.inf  # what the model itself rules out
        assert values[[0, 1, 2, 3, 5]].isfinite().all()
        assert values[1] > values[0]


@pytest.mark.parametrize("value", [-1e300, -5e-324, 5e-324, 1e300])
def test_a_bias_leaves_finite_logits(value: float) -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    TokenBias.of([(0, value), (2, value)], CPU).apply(logits)
    assert logits[0].tolist()[2] == -np.inf
    assert logits[0, :2].isfinite().all()
