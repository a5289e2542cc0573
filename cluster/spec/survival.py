"""Survival: the probability that the emitted path passes through a draft node.

A drafter claims it (`cluster.draft.candidates`), and whoever merges its trees (the target those of
residents, the coordinator the pool's) recalibrates the claims by the outcomes of verification
(`Calibrator`).  Both learn from *reached* nodes only.  Draws at other
nodes would bias them: the text has left the path there because the drafter misjudged the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenArray
from cluster.spec import evidence
from cluster.spec.evidence import isotonic
from cluster.spec.tree import Floats, Indices


def claimed_conditionals(parents: TokenArray | Indices, survival: FloatArray) -> Floats:
    """Return each node's probability given its parent, from survivals: float64[n] in [0, 1]."""
    values = survival.astype(np.float64)
    above = np.where(parents < 0, 1.0, values[parents])
    ratios = np.zeros(len(values))
    np.divide(values, above, out=ratios, where=above > 0.0)
    return np.where(ratios > 0.0, np.minimum(ratios, 1.0), 0.0)  # NaN becomes 0


# Bins of a probability: by its logit, and of equal width.
NUM_BINS = 24
NUM_EQUAL_BINS = 10
MAX_LOGIT = 6.0
_CENTRES = (np.arange(NUM_BINS) + 0.5) * (2.0 * MAX_LOGIT / NUM_BINS) - MAX_LOGIT
_MIN_REMEMBERED = 1e-6
# Half-life of an outcome, in observed nodes: drafters learn, and texts change.
NODE_DECAY = 0.5 ** (1.0 / 2000.0)
# So many observations is the identity worth beforehand, in the whole and in each bin.
_PRIOR = 20.0
_SLOPES = (0.1, 5.0)
_OFFSETS = (-5.0, 5.0)


class Calibrator:
    """Maps claimed conditional probabilities to observed ones, for one (drafter, task).

    calibrated = sigmoid(slope * logit(claimed) + offset + shift).  Slope and offset are Platt's
    form, which corrects a wrong temperature (slope) and a common bias (offset).  The shift depends
    on the claim and corrects claims that deviate from that form, as those from counts do (a token
    seen once in one place).  Outcomes are kept as counts per bin of the claim, with exponential
    forgetting.  The fit is a few Newton steps over the bins; a prior that is worth some
    observations (`_PRIOR`) pulls it towards the identity, and another one each bin towards the fit.
    """

    def __init__(self) -> None:
        """Native code reads and writes `sums`, the evidence, and `curve`, the fit, in place."""
        self.sums = np.zeros(3 * (NUM_BINS + NUM_EQUAL_BINS) + 1)
        bins = self.sums[: 3 * NUM_BINS].reshape(3, NUM_BINS)
        self._num, self._accepted, self._claims = bins  # _claims: sums of claimed logits
        # Per bin of the prediction that was made before the outcome was known: count, sum of
        # predictions, sum of outcomes.
        self._forecasts = self.sums[3 * NUM_BINS : -1].reshape(3, NUM_EQUAL_BINS)
        self._evidence = *bins, *self._forecasts
        self._unfitted = self.sums[-1:]  # number of nodes since the last fit
        # Slope and offset; the knots, claimed logits that ascend; and the shifts at these, which
        # are linear between them.
        self.curve = np.concatenate(([1.0, 0.0], _CENTRES, np.zeros(NUM_BINS)))
        self.curve_at = self.curve.ctypes.data

    def fit_if_due(self) -> None:
        """Fit anew if what was observed since the last fit is enough to tell, and is as much of
        all that is remembered as a new value is of a running mean."""
        if self._unfitted[0] >= max(evidence.FEW, evidence.RECENT * self._num.sum()):
            self._fit()

    def expected_error(self) -> float:
        """Return the expected calibration error of predictions that preceded their outcomes.

        It is the mean |predicted - observed| over ten bins of equal width, weighted by their
        counts, with the same forgetting as the fit (Naeini et al. 2015, for forecasts instead of a
        held-out set).
        """
        counts, predicted, observed = self._forecasts
        total = float(counts.sum())
        return float(np.abs(predicted - observed).sum()) / total if total > 0.0 else 0.0

    def export(self) -> list[list[float]]:
        """Return what it has learned as plain numbers."""
        return evidence.exported(*self._evidence)

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        evidence.restore(state, *self._evidence)
        self._fit()

    def _fit(self) -> None:
        """Fit slope and offset by penalised maximum likelihood: Newton steps, one axis at a time.

        The likelihood is concave, so this converges within the bounds too.  A slope below zero
        would reverse the drafter's ranking.
        """
        self._unfitted[:] = 0.0
        means = self._claims / np.maximum(self._num, 1e-12)
        features = (means, np.ones(NUM_BINS))
        weights, identity = self.curve[:2].tolist(), (1.0, 0.0)
        for _ in range(6):
            for axis, (low, high) in ((1, _OFFSETS), (0, _SLOPES)):
                probs = sigmoid(weights[0] * means + weights[1])
                slope = float(features[axis] @ (probs * self._num - self._accepted))
                slope += _PRIOR * (weights[axis] - identity[axis])
                curvature = float(features[axis] ** 2 @ (probs * (1.0 - probs) * self._num))
                step = max(-1.0, min(1.0, slope / (curvature + _PRIOR)))
                weights[axis] = max(low, min(high, weights[axis] - step))
        # If a bin's counts are almost forgotten, rounding can move its mean out of the bin.
        knots = np.where(self._num > _MIN_REMEMBERED, means, _CENTRES)
        # One shift per bin: the distance of its observed rate from the fit.  The rates are made
        # non-decreasing, so that calibration keeps the order of claims.
        totals, fitted = self._num + _PRIOR, weights[0] * knots + weights[1]
        rates = isotonic(
            ((self._accepted + _PRIOR * sigmoid(fitted)) / totals).tolist(), totals.tolist()
        )
        self.curve[:] = np.concatenate((weights, knots, logit(rates) - fitted))


def logit(probabilities: npt.ArrayLike) -> Floats:
    values = np.asarray(probabilities, dtype=np.float64)
    bound = 1.0 / (1.0 + math.exp(MAX_LOGIT))
    values = np.minimum(np.maximum(values, bound), 1.0 - bound)
    return np.log(values) - np.log1p(-values)


def sigmoid(logits: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-logits))
