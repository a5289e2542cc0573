"""How many nodes to verify, how many to draft, and whether to wait: one price for all three.

A second is worth what the batch has emitted per second of late, its *rate*.  What is bought with
time must bring more than that:

    n: the nodes to verify          gain(n) - rate * (T_v(B, n) - T_v(B, 0))
    m: what residents draft next    E[max over n of the above | trees of m nodes] - rate * T_d(B, m)
                                    once for look-ups alone, once for models beside them
    w: a wait for pool drafters     max over n of the above, with the trees expected then - rate * w

gain(n): the n greatest weighted survivals of the batch.  Survival does not increase along a path,
so the best n nodes are closed under parents.  n = m = w = 0, plain decoding, is always a
candidate, and the rate is never taken to be below plain decoding's.  Maximising what is left after
paying for time at the rate achieved so far leads to the greatest rate there is (Dinkelbach 1967).

A sequence's tokens count in units of what it emits per step (`weights`): what is as great as can
be is then the weighted geometric mean of the sequences' speeds (proportional fairness; Kelly,
Maulloo and Tan 1998).  The plain sum would let those whose drafts hold make the others, which step
with them, slower than plain decoding.

Everything here is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray
from cluster.records import record
from cluster.spec import evidence
from cluster.spec.forest import Floats, Indices, Mask
from cluster.spec.step_cost import DRAFT_LENGTHS, NODE_EDGES


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


class DraftLengthValues:
    """What trees of m nodes per sequence are worth, for the numbers m that residents may draft.

    Learned as the steps from one m to the next, each from trees that were large enough to tell
    both: what changes from text to text then moves all of them alike.
    """

    def __init__(self) -> None:
        self._steps = np.zeros(len(DRAFT_LENGTHS))
        self._squares = np.zeros(len(DRAFT_LENGTHS))  # of values' deviations from their mean
        self._counts = np.zeros(len(DRAFT_LENGTHS), dtype=np.int64)

    def learn(self, values: Floats) -> None:
        """values: what the batch would have been worth with its best m nodes of each sequence, for
        the first of DRAFT_LENGTHS."""
        steps = np.diff(values, prepend=0.0)
        own = slice(0, len(values))
        self._counts[own] += 1
        shares = np.maximum(1.0 / self._counts[own], evidence.RECENT)
        deviations = values - self._steps[own].cumsum()
        self._steps[own] += shares * (steps - self._steps[own])
        squares = deviations * (values - self._steps[own].cumsum())
        self._squares[own] += shares * (squares - self._squares[own])

    @property
    def num_learned(self) -> int:
        return int(self._counts.max())

    def export(self) -> list[list[float]]:
        """What was learned, as plain values."""
        return [
            self._steps.tolist(),
            self._squares.tolist(),
            self._counts.astype(np.float64).tolist(),
        ]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from what `export` gave; ValueError where it is of another form."""
        found = np.array(state, dtype=np.float64)
        if found.shape != (3, len(DRAFT_LENGTHS)) or not np.isfinite(found).all():
            raise ValueError("values of draft lengths of another form")
        self._steps, self._squares, self._counts = found[0], found[1], found[2].astype(np.int64)

    def value(self, num_nodes: int) -> float:
        """What trees of so many nodes were worth, before paying for the drafting."""
        return float(self._steps[num_nodes >= DRAFT_LENGTHS].sum())

    def choose(self, draft_s: Floats, rate: float, max_nodes: int) -> tuple[int, float]:
        """(m, its value after paying for the drafting, less a standard error): 0 where none is
        worth it.

        draft_s: float64[DRAFT_LENGTHS], seconds.
        """
        # What was seen a few times may have been luck.
        shares = np.maximum(1.0 / np.maximum(self._counts, 1), evidence.RECENT)
        errors = np.sqrt(shares * np.maximum(self._squares, 0.0))
        values = self._steps.cumsum() - errors - rate * draft_s
        values[(max_nodes < DRAFT_LENGTHS) | (self._counts == 0)] = -1.0
        best = int(values.argmax())
        if values[best] <= 0.0:
            return 0, float(values[best])
        return int(DRAFT_LENGTHS[best]), float(values[best])
