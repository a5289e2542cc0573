"""The gap of a token: the least change of logits that makes it the drawn one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cluster.core import SamplingParams
from cluster.spec.draw import gap_of
from tests.spec.test_draw import drawn as drawn_rows

VOCAB_SIZE = 24
TRIPLE = (7, 3, 1)
SAMPLED = SamplingParams(temperature=0.7, seed=TRIPLE[0], stream=TRIPLE[2])


def drawn(logits: torch.Tensor, params: SamplingParams) -> int:
    return int(drawn_rows(logits.unsqueeze(0).numpy(), [params], [TRIPLE[1]])[0])


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SAMPLED, replace(SAMPLED, temperature=1.6)],
    ids=["greedy", "sampled", "hot"],
)
def test_a_token_that_gains_more_than_its_gap_is_drawn_and_else_not(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        logits = torch.randn(VOCAB_SIZE, generator=generator)
        winner = drawn(logits, params)
        for token in (each for each in range(VOCAB_SIZE) if each != winner):
            gap = gap_of(logits, winner, token, params, TRIPLE)
            raised = logits.clone()
            raised[token] += gap - 1e-3
            assert drawn(raised, params) != token
            raised[token] += 2e-3
            assert drawn(raised, params) == token


def test_a_token_at_the_border_of_the_law_is_near() -> None:
    logits = torch.full((VOCAB_SIZE,), -20.0)
    logits[:3] = torch.tensor([1.0, 0.5, 0.4999])
    params = replace(SAMPLED, top_k=2)
    # Among the two that are kept, and with the third that nearly was.
    winner = drawn(logits, params)
    assert gap_of(logits, winner, 5, params, TRIPLE) > 10.0
    for kept, other in ((1, 2), (0, 1)):
        ahead = gap_of(logits, kept, other, params, TRIPLE)
        assert 0.0 <= ahead < math.inf
    # Where the one that is drawn is the last that is kept, a little less would have banned it.
    assert gap_of(logits, 1, 0, params, TRIPLE) == 0.0


def test_a_banned_token_is_out_of_reach() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[4] = -torch.inf
    for params in (SAMPLED, SamplingParams(temperature=0.0)):
        assert gap_of(logits, 0, 4, params, TRIPLE) == math.inf
