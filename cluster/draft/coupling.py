"""The target's draw as a drafter knows it: the shared noise, and where the text must end.

The target emits argmax(log p_i + G[t, i]).  A drafter that ranks its candidates with the same G
predicts the target's token far more often than one that ranks by probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.core import SamplingParams
from cluster.spec.noise import gumbel

# A correct match is modelled as a copy, in which the copied token has this probability.
_COPY_MASS = 0.95

# Counts tell the target's probabilities roughly, so the noise decides less among them than among
# probabilities.  Along answers of SmolLM2 at T = 0.8, 0.4 has 2 % more of a suffix drafter's drafts
# accepted than 1, and its claims are 6 % too high in place of 33 %; 0.3 and 0.5 are nearly as good.
COUNT_TRUST = 0.4


def is_useful(params: SamplingParams, position: int, token_id: int) -> bool:
    """True if a draft of `token_id` at output position `position` can save a step.

    The parent's draw emits a token that ends the text, whether or not the tree has a node for it.
    """
    if position + 1 >= params.max_tokens:
        return False
    return position < params.min_tokens or token_id not in params.stop_token_ids


def count_conditionals(
    params: SamplingParams,
    position: int,
    token_ids: Sequence[int],
    counts: Sequence[float],
    hit_rate: float,
    trust: float = COUNT_TRUST,
) -> list[float]:
    """The probability that each candidate is the target's token; their sum is below 1.

    hit_rate: probability that the target's token is among them.  Greedy: hit_rate, divided in
    proportion to the counts.  Sampled: with probability w = hit_rate / c the text is a copy, in
    which the candidates have the mass c.  Candidate i then beats all other tokens with probability
    exp(-(1 - c) * exp(-score_i)), score_i = log(c * count ratio) + G_i, because the best of the
    others is Gumbel(log(1 - c)).  The average over G is hit_rate again.  trust: how far the scores
    decide among the candidates; 1 = as here, where counts are probabilities.
    """
    total = sum(counts)
    if params.temperature == 0.0:
        return [hit_rate * count / total for count in counts]
    mass = max(_COPY_MASS, hit_rate)
    noise = gumbel(params.noise_key, position, np.array(token_ids), params.stream).tolist()
    scores = [
        math.log(mass * count / total) + each for count, each in zip(counts, noise, strict=True)
    ]
    best = max(scores)
    weights = [math.exp(trust * (score - best)) for score in scores]
    share = hit_rate / mass / sum(weights)
    return [
        share * weight * math.exp(-(1.0 - mass) * math.exp(-score))
        for weight, score in zip(weights, scores, strict=True)
    ]
