"""How many nodes to verify, and what to draft: one price for both.

A second is worth what the batch has emitted per second of late, its *rate*.  What is bought with
time must bring more than that:

    n: the nodes to verify          gain(n) - rate * (T_v(B, n) - T_v(B, 0))
    m: what residents draft next    the above, as trees of m nodes lead to expect it, less
                                    rate * T_d(B, m); once for look-ups alone, once for models
                                    beside them (`cluster.plan.arms`)

gain(n): the n greatest weighted survivals of the batch.  Survival does not increase along a path,
so the best n nodes are closed under parents.  n = m = 0, plain decoding, is always a
candidate, and the rate is never taken to be below plain decoding's.  Maximising what is left after
paying for time at the rate achieved so far leads to the greatest rate there is (Dinkelbach 1967).

A sequence's tokens count in units of what it emits per step (`weights`): what is as great as can
be is then the weighted geometric mean of the sequences' speeds (proportional fairness; Kelly,
Maulloo and Tan 1998).  The plain sum would let those whose drafts hold make the others, which step
with them, slower than plain decoding.

Everything here is a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray
from cluster.records import record
from cluster.spec.forest import Floats, Indices, Mask
from cluster.spec.step_cost import NODE_EDGES


@record(frozen=True, slots=True, eq=False)
class Prices:
    """What is paid for a step of this batch.

    rate: weighted tokens per second.  extra_s: float64[EDGES], what steps of so many nodes take
    longer than a plain one.  max_extra_s: what the guard allows a round to take longer.
    """

    rate: float
    extra_s: Floats
    max_extra_s: float


@record(frozen=True, slots=True)
class Choice:
    """num_nodes: of the ranking, best first.  value: weighted tokens beyond a plain step's, after
    paying for the time; never negative.  extra_s: what the step takes longer than a plain one."""

    num_nodes: int
    value: float
    extra_s: float


NOTHING = Choice(0, 0.0, 0.0)


def choose_nodes(gains: Floats, prices: Prices, spent_s: float = 0.0) -> Choice:
    """The best number of nodes to verify.

    gains: float64[n], weighted survivals, best first.  spent_s: what the round takes beside its
    step (drafting, waiting), of which the guard must know.
    """
    num_gains = len(gains)
    if num_gains == 0:
        return NOTHING
    counts = NODE_EDGES[: int(np.searchsorted(NODE_EDGES, num_gains))]
    counts = np.append(counts, num_gains)
    sums = np.zeros(num_gains + 1)
    np.cumsum(gains, out=sums[1:])
    extra_s = np.interp(counts, NODE_EDGES, prices.extra_s)
    values = sums[counts] - prices.rate * extra_s
    values[extra_s + spent_s > prices.max_extra_s] = -1.0
    values[0] = 0.0
    best = int(values.argmax())
    return Choice(int(counts[best]), float(values[best]), float(extra_s[best]))


def ranking(survival: FloatArray, weights: Floats, is_admissible: Mask) -> tuple[Indices, Floats]:
    """The admissible nodes of a batch and their weighted gains, best first.

    survival: float32[n], parents before children and never below them.  weights: float64[n], of
    each node's sequence.  The sort is stable, so every beginning of it is closed under parents.
    """
    gains = survival * weights
    nodes = np.flatnonzero(is_admissible & (gains > 0.0))
    nodes = nodes[np.argsort(-gains[nodes], kind="stable")]
    return nodes, gains[nodes]


@dataclass(frozen=True, slots=True)
class Ask:
    """What residents draft after a step: num_nodes of each sequence, 0 = nothing.

    with_models: all of them do; else look-ups alone, which take next to no time.  unread: places of
    sequences for which look-ups alone are asked yet: to read all at once would take too long.
    """

    num_nodes: int = 0
    with_models: bool = True
    unread: frozenset[int] = frozenset()

    def of(self, place: int) -> Ask:
        """What is asked for the sequence at that place of the batch."""
        return Ask(self.num_nodes, with_models=False) if place in self.unread else self


NO_DRAFTS = Ask()
