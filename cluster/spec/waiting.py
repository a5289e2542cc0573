"""Whether to wait for pool drafters that are about to answer, by what came so long after others.

A wait is for texts of which nothing is at hand, and as long as its price, the tokens that the time
would have brought otherwise, is below what the trees to be expected by then are worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray
from cluster.spec import evidence
from cluster.spec.budget import Choice, Prices, choose_nodes
from cluster.spec.forest import Floats

# The waits that are priced, in seconds; a tree that needs longer is not worth waiting for.
WAITS_S: tuple[float, ...] = (0.001, 0.002, 0.004, 0.008)
# Survivals that are kept of a tree, best first.
NUM_RANKS = 16
# Weight of the newest commit in the share of those that are answered at all: one that does not come
# is to be noticed within a few.
_ANSWERED_WEIGHT = 0.5
# A wait must promise so many times its price: texts that drafters have just missed are harder for
# them than their claims say.
_LEAST_PROMISE = 2.0
# A drafter's first commits say too little of the next one.
_FEWEST = 4


def profile(survival: FloatArray) -> Floats:
    """The greatest survivals, best first, zeros after them: float64[NUM_RANKS]."""
    best = np.sort(survival)[::-1][:NUM_RANKS]
    padded = np.zeros(NUM_RANKS)
    padded[: len(best)] = best
    return padded


class ArrivalTable:
    """Mean survivals of one drafter's newest tree so long after a commit that left it none."""

    def __init__(self) -> None:
        self._means = np.zeros((len(WAITS_S), NUM_RANKS))
        self._counts = np.zeros(len(WAITS_S), dtype=np.int64)
        self._answered = 1.0

    def observe(
        self,
        trees: Sequence[tuple[float, FloatArray]],
        elapsed_s: float,
        *,
        is_answered: bool = True,
    ) -> None:
        """One commit and what followed, up to elapsed_s: later times are unknown.

        trees: (seconds since the commit, calibrated survivals) in order of arrival.  is_answered:
        a tree came, or word that there is none.
        """
        if is_answered or elapsed_s >= WAITS_S[0]:
            self._answered += _ANSWERED_WEIGHT * (is_answered - self._answered)
        for index, wait_s in enumerate(WAITS_S):
            if wait_s > elapsed_s:
                return
            came = [survival for age_s, survival in trees if age_s <= wait_s]
            newest = profile(came[-1]) if came else np.zeros(NUM_RANKS)
            self._counts[index] += 1
            share = max(1.0 / float(self._counts[index]), evidence.RECENT)
            self._means[index] += share * (newest - self._means[index])

    def expected(self) -> Floats:
        """Survivals after each of WAITS_S: float64[WAITS_S, NUM_RANKS]; zeros while unknown."""
        known = np.where((self._counts >= _FEWEST)[:, np.newaxis], self._means, 0.0)
        # A later tree holds the earlier one: a mean that falls is noise.
        return np.asarray(np.maximum.accumulate(known, axis=0)) * self._answered


@dataclass(frozen=True, slots=True)
class Wait:
    """wait_s: how long at most.  choice: what the step is expected to be then."""

    wait_s: float
    choice: Choice


def choose_wait(
    gains: Floats, arriving: Floats, prices: Prices, max_wait_s: float, least_value: float
) -> Wait | None:
    """The wait that is worth most; None where going now, or another tree, is worth as much.

    gains: float64[n], of the texts that are not waited for.  arriving: float64[texts, WAITS_S,
    ranks], weighted survivals to expect of those that are.  least_value: that it must exceed.
    """
    best: Wait | None = None
    for index, wait_s in enumerate(WAITS_S):
        if wait_s > max_wait_s:
            break
        later = np.concatenate([gains, arriving[:, index].ravel()])
        later = np.sort(later[later > 0.0])[::-1]
        choice = choose_nodes(later, prices, spent_s=wait_s)
        value = choice.value - _LEAST_PROMISE * prices.rate * wait_s
        if value > least_value:
            best, least_value = Wait(wait_s, choice), value
    return best
