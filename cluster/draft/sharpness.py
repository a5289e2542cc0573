"""Calibrates a draft model's scores online, from the tokens that the target committed.

The probability that the target draws candidate i is modelled as
coverage * softmax(scores / tau)_i.  tau grows with the mismatch of the two models; coverage is the
share of draws whose token is among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.spec.survival import TauFit, conditional

Array = npt.NDArray[np.float64]

_INITIAL_TAU = 1.3
# Weight of the initial coverage, and the number of observations after which it starts to forget.
_PRIOR_WEIGHT = 20.0
_MEMORY = 2000.0


class Sharpness:
    """The calibration, tau and coverage, of one kind of request."""

    def __init__(self) -> None:
        self._fit = TauFit(_INITIAL_TAU)
        self._covered = _PRIOR_WEIGHT
        self._trials = _PRIOR_WEIGHT + 1.0

    @property
    def tau(self) -> float:
        return self._fit.tau

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
        # The scores are already divided by the temperature and include the noise.
        self._fit.observe(scores[np.isfinite(scores)], 0.0, rank)


def conditionals(scores: Array, fits: Sequence[Sharpness]) -> Array:
    """coverage * softmax(scores / tau), row by row.

    scores: float64[rows, m], the first of each row finite.  fits: of each row.  Returns
    float64[rows, m].
    """
    taus = np.array([[fit.tau] for fit in fits])
    coverages = np.array([[fit.coverage] for fit in fits])
    # Rows of different requests have different taus, so the scores are divided by them first.
    shares: Array = conditional(scores / taus, 0.0, 1.0) * coverages
    return shares
