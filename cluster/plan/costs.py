"""Predicts the time of a round as a sum of parts, each with a factor that is learned.

A step consists of a plain step and of the rows beyond it.  The profile gives both; their factors
are the machine's present speed and the price of a row.  Drafting consists of a call, its texts and
their nodes.  So each measurement informs the estimates of all sizes, and a machine that has become
slower is not taken for a loss of speculation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from cluster.spec import evidence
from cluster.spec.forest import Floats
from cluster.spec.step_cost import EDGES
from cluster.spec.step_profile import StepProfile

# After so many rounds a measurement counts about a third of what it counted at first.
_MEMORY = 64.0
# The prior counts as much as so many measured rounds.
_PRIOR_ROUNDS = 2.0
# A round counts as at most so many times its expected time; beyond that, something else slowed it.
_STRAY = 2.0
# A factor falls to no less than this share of its prior.
_LEAST_SHARE = 0.001
# Rows at which computing costs as much as reading the weights, for a target without a profile.
_KNEE_ROWS = 32.0
# A drafting call takes as long as so many nodes, until that is measured: on two cores SmolLM2's
# residents take 3.6 ms for 1 node and 4.5 ms for 16.
_DRAFT_BASE = 16.0
# Sizes of rounds whose parts are kept: a target of 64 sequences meets a few per number of them.
_MAX_KEPT = 1024

# (sequences, other rows, numbers of nodes) -> the parts of such rounds: float64[nodes, parts].
Parts = Callable[[int, int, Floats], Floats]


def step_parts(profile: StepProfile | None) -> Parts:
    """Return the parts of a step by the target's profile: a plain step, and its nodes' rows."""

    def parts(num_sequences: int, num_others: int, num_nodes: Floats) -> Floats:
        rows = num_sequences + num_others + np.concatenate(([0.0], num_nodes))
        times = 1.0 + rows / _KNEE_ROWS if profile is None else profile.at(rows)
        return np.stack((np.full(len(num_nodes), times[0]), times[1:] - times[0]), axis=1)

    return parts


def draft_parts(num_sequences: int, num_others: int, num_nodes: Floats) -> Floats:
    """Return the parts of drafting: the call, its texts, its passes, and their nodes.

    num_nodes: of each text.
    """
    share = num_sequences / _KNEE_ROWS
    base = _DRAFT_BASE * (num_nodes > 0)
    return np.stack((base, share * base, num_nodes, share * num_nodes), axis=1)


class RoundTimes:
    """The times of rounds by numbers of sequences and nodes, fitted by least squares to the latest.

    num_recorded: the rounds that were recorded so far.
    """

    def __init__(self, parts: Parts, *, is_in_seconds: bool = False) -> None:
        """is_in_seconds: the parts are seconds, and are the estimate before any measurement."""

        @functools.lru_cache(_MAX_KEPT)  # every step asks for a few, and asks for them again
        def kept(num_sequences: int, num_others: int, num_nodes: tuple[int, ...]) -> Floats:
            return parts(num_sequences, num_others, np.array(num_nodes, dtype=np.float64))

        self._parts = kept
        self._prior: Floats = np.ones(kept(1, 0, (1,)).shape[1])
        self._factors: Floats | None = self._prior if is_in_seconds else None
        size = len(self._prior)
        # Sums over rounds, each round in units of its expected time.
        self._products, self._times = np.zeros((size, size)), np.zeros(size)
        self.num_recorded = 0

    def record(self, num_sequences: int, num_nodes: int, time_s: float) -> None:
        """Record the time of one round."""
        parts = self._parts(num_sequences, 0, (num_nodes,))[0]
        if self._factors is None:
            self._prior *= time_s / float(parts.sum())
            self._factors = self._prior
        expected_s = float(parts @ self._factors)
        scaled = parts / expected_s
        self.num_recorded += 1
        self._learn(scaled, time_s / expected_s)

    def record_rows(self, num_sequences: int, num_rows: int, time_s: float) -> None:
        """Record the time of a step that had num_rows rows of prompts beside its sequences' rows.

        Such rows are not nodes, but until nodes are measured they are the best estimate of a row.
        """
        if self._factors is None or num_rows < _KNEE_ROWS:
            return
        plain, extra = self._parts(num_sequences, 0, (num_rows,))[0].tolist()
        price = max(time_s - float(self._factors[0]) * plain, 0.0) / extra if extra > 0.0 else 1.0
        self._prior = np.array([self._prior[0], 0.5 * (self._prior[1] + price)])
        self._fit()

    def _learn(self, scaled: Floats, ratio: float) -> None:
        self._products += np.outer(scaled, scaled) - self._products / _MEMORY
        self._times += scaled * min(ratio, _STRAY) - self._times / _MEMORY
        self._fit()

    def _fit(self) -> None:
        # The prior counts as further rounds, with the same features as those that were recorded.
        num_rounds = max(min(self.num_recorded, _MEMORY), 1.0)
        beliefs = _PRIOR_ROUNDS / num_rounds * self._products.diagonal() + 1e-12
        weighed: Floats = self._products + np.diag(beliefs)
        times: Floats = self._times + beliefs * self._prior
        found: Floats = np.asarray(np.linalg.solve(weighed, times), dtype=np.float64)
        # Above zero, for the next round is measured in units of its expected time.
        self._factors = np.maximum(found, _LEAST_SHARE * self._prior)

    def at_edges(
        self, num_sequences: int, num_others: int = 0, num_nodes: tuple[int, ...] = EDGES
    ) -> Floats | None:
        """Return the seconds for each number of nodes; None while nothing is known.

        num_others: rows of prompts in the same step.
        """
        if self._factors is None:
            return None
        found: Floats = self._parts(num_sequences, num_others, num_nodes) @ self._factors
        return found

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        found = self.at_edges(num_sequences, num_nodes=(num_nodes,))
        return None if found is None else float(found[0])

    def export(self) -> list[list[float]]:
        """Return the measurements as plain values."""
        factors = [] if self._factors is None else self._factors.tolist()
        return [factors, *evidence.exported(self._products, self._times)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        factors, *sums = state
        found, products, times = (
            np.ones_like(each) for each in (self._prior, self._products, self._times)
        )
        evidence.restore([factors or found.tolist(), *sums], found, products, times)
        if (found <= 0.0).any() or (products < 0.0).any():
            raise ValueError("times of rounds that are none")
        if factors:
            self._factors = self._prior = found
        self._products, self._times = products, times
        self.num_recorded = math.ceil(float(products[0, 0])) if factors else 0
