"""Decides at one price of time how many nodes to verify and how many to draft.

The price of a second is the batch's *rate*: the tokens that it has recently emitted per second.
Verifying and drafting must gain more tokens than their time costs.  Each of the following is
maximised:

    n: the nodes to verify          gain(n) - rate * (T_v(B, n) - T_v(B, 0))
    m: the nodes to draft next      the expectation of the above for trees of m nodes, less
                                    rate * T_d(B, m); once for look-ups alone, once for look-ups
                                    with models (`cluster.spec.arms`)

gain(n): the sum of the n greatest weighted survivals of the batch.  Survival does not increase
along a path, so the best n nodes are closed under parents.  n = m = 0, plain decoding, is always a
candidate, and the rate is never taken to be below plain decoding's.  Maximising the gain minus the
price at the rate achieved so far converges to the greatest possible rate (Dinkelbach 1967).

A sequence's tokens are weighted by the inverse of its tokens per step (`weights`).  This maximises
the weighted geometric mean of the sequences' speeds (proportional fairness; Kelly, Maulloo and Tan
1998).  With the plain sum, sequences whose drafts are accepted would make the others, which share
their steps, slower than plain decoding.

Everything here is a pure function.
"""

from __future__ import annotations

import math

import numpy as np

from cluster.core import FloatArray
from cluster.records import equal_record, frozen, record
from cluster.spec.step_profile import NODE_EDGES
from cluster.spec.tree import Floats, Indices, Mask


@record
class Prices:
    """The prices of a step of this batch.

    rate: weighted tokens per second.  extra_s: float64[EDGES], the time that steps of so many nodes
    take longer than a plain one.  max_extra_s: the extra time that the guard allows a round.
    """

    rate: float
    extra_s: Floats
    max_extra_s: float


@equal_record
class BudgetChoice:
    """A number of nodes to verify.

    num_nodes: so many of the ranking, best first.  value: weighted tokens beyond a plain step's,
    less the price of the time.  extra_s: the step's time beyond a plain one's.
    """

    num_nodes: int
    value: float
    extra_s: float


def choose_nodes(gains: Floats, prices: Prices, spent_s: float = 0.0) -> BudgetChoice:
    """The best number of nodes to verify.

    gains: float64[n], weighted survivals, best first.
    spent_s: the round's time beside its step (drafting, waiting), which counts for the guard.
    """
    num_gains = len(gains)
    counts = NODE_EDGES[: int(np.searchsorted(NODE_EDGES, num_gains))]
    counts = np.append(counts, num_gains)
    sums = np.zeros(num_gains + 1)
    np.cumsum(gains, out=sums[1:])
    extra_s = np.interp(counts, NODE_EDGES, prices.extra_s)
    values = sums[counts] - prices.rate * extra_s
    values[(extra_s + spent_s > prices.max_extra_s) & (counts > 0)] = -math.inf
    best = int(values.argmax())
    return BudgetChoice(int(counts[best]), float(values[best]), float(extra_s[best]))


def ranking(survival: FloatArray, weights: Floats, is_admissible: Mask) -> tuple[Indices, Floats]:
    """The admissible nodes of a batch and their weighted gains, best first.

    survival: float32[n], parents before children and never below them.  weights: float64[n], of
    each node's sequence.  The sort is stable, so every beginning of it is closed under parents.
    """
    gains = survival * weights
    nodes = np.flatnonzero(is_admissible & (gains > 0.0))
    nodes = nodes[np.argsort(-gains[nodes], kind="stable")]
    return nodes, gains[nodes]


@frozen
class Ask:
    """The drafts that residents are asked for after a step: num_nodes per sequence, 0 = nothing.

    with_models: models draft beside look-ups, which take hardly any time.  Which of the residents
    draft for a text says its mask (`cluster.plan.ensemble`).
    """

    num_nodes: int = 0
    with_models: bool = True


NO_DRAFTS = Ask()
