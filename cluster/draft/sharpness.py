"""Calibrates a draft model's scores online, from the tokens that the target committed.

The probability that the target draws candidate i is modelled as
coverage * softmax(scores / tau)_i.  tau grows with the mismatch of the two models; coverage is the
share of draws whose token is among the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_INITIAL_TAU = 1.3
_TAU_BOUNDS = (0.05, 20.0)
# The longest step of log tau at the first draw, and the shortest one, by which it follows a drift.
_FIRST_STEP = 0.3
_LEAST_STEP = 0.02
# Weight of the initial coverage, and the number of observations after which it starts to forget.
_PRIOR_WEIGHT = 20.0
_MEMORY = 2000.0


class Sharpness:
    """The calibration, tau and coverage, of one kind of request.

    tau is fitted by gradient descent on the log-loss, from reached nodes only: the text has left
    the path at others because the drafter misjudged the context."""

    def __init__(self) -> None:
        self.tau = _INITIAL_TAU
        self._num_drawn = 0
        self._covered = _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT + 1.0

    @property
    def coverage(self) -> float:
        """Share of draws among the candidates; in (0, 1), so survival falls along every path."""
        return self._covered / self._trials

    def learn(self, scores: Array, rank: int | None) -> None:
        """Learn that the target drew candidate `rank` where the drafter had `scores`, descending.

        rank: None if the token was no candidate; this changes coverage but not tau.
        """
        if self._trials >= _MEMORY:
            self._trials *= 0.5
            self._covered *= 0.5
        self._trials += 1.0
        if rank is None:
            return
        self._covered += 1.0
        self._num_drawn += 1
        possible = scores[np.isfinite(scores)]
        # d(-log share of the drawn) / d(log tau) = (its score - mean score) / tau
        mean = _softmax(possible / self.tau) @ possible
        slope = max(-2.0, min(2.0, float(possible[rank] - mean) / self.tau))
        step = max(_FIRST_STEP / math.sqrt(self._num_drawn), _LEAST_STEP) * slope
        self.tau = max(_TAU_BOUNDS[0], min(_TAU_BOUNDS[1], self.tau * math.exp(-step)))


def conditionals(scores: Array, fits: Sequence[Sharpness]) -> Array:
    """coverage * softmax(scores / tau), row by row.

    scores: float64[rows, m], divided by the temperature and with the noise, the first of each row
    finite.  fits: of each row.  Returns float64[rows, m].
    """
    taus = np.array([[fit.tau] for fit in fits])
    coverages = np.array([[fit.coverage] for fit in fits])
    shares: Array = _softmax(scores / taus) * coverages
    return shares


def _softmax(values: Array) -> Array:
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    shares: Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares
