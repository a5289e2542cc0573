"""Decides at one price of time how many nodes to verify and how many to draft.

The price of a second is the batch's *rate*: the tokens that it has recently emitted per second.
Verifying and drafting must gain more tokens than their time costs.  Each of the following is
maximised:

    n: the nodes to verify          gain(n) - rate * (T_v(B, n) - T_v(B, 0))
    m: the nodes to draft next      the expectation of the above for trees of m nodes, less
                                    rate * T_d(B, m); once for look-ups alone, once for look-ups
                                    with models (`Arm`)

gain(n): the sum of the n greatest weighted survivals of the batch.  Survival does not increase
along a path, so the best n nodes are closed under parents.  n = m = 0, plain decoding, is always a
candidate, and the rate is never taken to be below plain decoding's.  Maximising the gain minus the
price at the rate achieved so far converges to the greatest possible rate (Dinkelbach 1967).

A sequence's tokens are weighted by the inverse of its tokens per step (`weights`).  This maximises
the weighted geometric mean of the sequences' speeds (proportional fairness; Kelly, Maulloo and Tan
1998).  With the plain sum, sequences whose drafts are accepted would make the others, which share
their steps, slower than plain decoding.

The choice is a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray
from cluster.records import equal_record, frozen, record
from cluster.spec import evidence
from cluster.spec.step_profile import NODE_EDGES
from cluster.spec.survival import NUM_EQUAL_BINS
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
    spent_s: the time of drafting beside the step, which counts for the guard.
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
    draft for a text says its team (`cluster.plan.texts.Text.asked`).
    """

    num_nodes: int = 0
    with_models: bool = True


NO_DRAFTS = Ask()


# The share of the time that each kind of exploration may take.  The kinds are trees of other sizes
# than the one that pays, models that are not the best for a text, and drafts that would pay if they
# were trusted.
_EXPLORED_SHARE = 0.003
# The same share for so many first tries of a kind.  It spreads them over a text, because the
# beginning of a text is not typical of the rest.  After two of them a text with three models on a
# CPU often stayed with the wrong one: 0.92 of the speed with the right one, after four 0.99.
_FIRST_SHARE = 0.05
_FIRST_TRIES = 4
# What an outcome counts after each further token: half after 140 tokens, and in the short memory,
# a running mean like all others, after 14.
_KEPT = 0.995
# Where a drafter brings less than this share of what it brought, the text has changed, and its
# outcomes so far tell nothing of the rest.
_CHANGED_SHARE = 0.5
# Nodes of each text that residents may be asked for, and before the worth of drafts is known.
SIZES = (2, 4, 8, 16)
FIRST_NODES = 8
_FIRST_RANKS = np.array((0, *SIZES[:-1]))  # first rank of the group of ranks that each size adds


@dataclass(slots=True)
class Exploration:
    """One kind of exploration: when it was last done, and how many times so far."""

    done_at: float = -math.inf
    num_done: int = 0

    def begin(self, now: float, cost_s: float) -> bool:
        """Begin now if its cost is within its share of the time since it was last done; returns
        whether it does."""
        share = _FIRST_SHARE if self.num_done < _FIRST_TRIES else _EXPLORED_SHARE
        if now - self.done_at < cost_s / share:
            return False
        self.done_at = now
        self.num_done += 1
        return True


_NO_OUTCOMES = (0, 0.0, 0.0, 0.0, 0.0)


class Standing:
    """How the drafters of one text have fared in it.

    An outcome is the accepted of a tree's best few nodes, at a place where a step with them would
    have begun.  turns: by model, of the exploration of those that are not asked.
    """

    def __init__(self) -> None:
        self.turns: dict[str, Exploration] = {}
        # By drafter: the latest place; outcomes and accepted, and both in the short memory.
        self._sums: dict[str, tuple[int, float, float, float, float]] = {}

    def note(self, drafter: str, place: int, accepted: int) -> None:
        """Enter an outcome; place: the length of the text at the tree's root."""
        known_at, num, total, num_late, late = self._sums.get(drafter, _NO_OUTCOMES)
        age = max(place - known_at, 0)
        kept, kept_late = _KEPT**age, (1.0 - evidence.RECENT) ** age
        num, total = kept * num + 1.0, kept * total + accepted
        num_late, late = kept_late * num_late + 1.0, kept_late * late + accepted
        self._sums[drafter] = place, num, total, num_late, late
        if num > evidence.FEW and late * num < _CHANGED_SHARE * total * num_late:
            self._sums.clear()
            self.turns.clear()

    def forget(self, drafter: str) -> None:
        """Forget the outcomes of a drafter, which has another model now."""
        self._sums.pop(drafter, None)
        self.turns.pop(drafter, None)

    def expected(self, drafter: str, place: int, prior: float) -> float:
        """Return the tokens to expect of a drafter's best few nodes.  prior: in other texts."""
        known_at, num, total, _, _ = self._sums.get(drafter, _NO_OUTCOMES)
        kept = _KEPT ** max(place - known_at, 0)
        return (evidence.PRIOR * prior + kept * total) / (evidence.PRIOR + kept * num)


@dataclass(slots=True)
class Recent:
    """Two sums over rounds, of which the latest count most."""

    gained: float = 0.0
    spent: float = 0.0

    def add(self, gained: float, spent: float) -> None:
        self.gained += gained - evidence.RECENT * self.gained
        self.spent += spent - evidence.RECENT * self.spent

    def ratio(self, otherwise: float) -> float:
        """Return the first sum by the second; otherwise: while there is none."""
        return self.gained / self.spent if self.spent else otherwise


class Arm:
    """The nodes that one arm has added, by rank and survival; the latest turns count most.

    Residents draft in two arms, look-ups alone or look-ups with models, and in four sizes.  What
    is learned of an arm is how the survival of its r-th best node of a text is distributed, beyond
    the trees held without it; that does not depend on present prices.  From it follows the worth
    of a size at any price:

        value(m) = max over s of  tokens of the nodes with a survival of at least s among the best m
                                  - rate * (T_v(B, their number) - T_v(B, 0))

    A mean survival would not suffice: drafts are worth much in few places and little in all others.

    kept: of its promised tokens, those that were accepted, and all.  tried, verified: its
    explorations beyond what pays: trees that are drafted, and trees that are verified.
    """

    def __init__(self) -> None:
        self.kept = Recent(evidence.FEW, evidence.FEW)
        self.tried, self.verified = Exploration(), Exploration()
        # Nodes per text and turn, and their tokens: by size and by bin of survival, the greatest
        # first.
        self._nodes, self._tokens = np.zeros((2, len(SIZES), NUM_EQUAL_BINS))
        self._turns = np.zeros(len(SIZES), dtype=np.int64)

    def learn(self, ranks: Indices, survival: Floats, num_texts: int, size: int) -> None:
        """Learn from a turn in which num_texts texts were asked for trees of `size` nodes.

        ranks, survival: of the nodes that only this arm has proposed; ranks are within each text.
        """
        groups = np.searchsorted(SIZES, ranks, side="right")
        is_counted = groups < len(SIZES)
        groups, survival = groups[is_counted], survival[is_counted]
        bins = np.minimum(((1.0 - survival) * NUM_EQUAL_BINS).astype(np.int64), NUM_EQUAL_BINS - 1)
        cells = groups * NUM_EQUAL_BINS + bins
        known = size > _FIRST_RANKS
        self._turns += known
        share = (known * np.maximum(1.0 / np.maximum(self._turns, 1), evidence.RECENT))[:, None]
        for sums, weights in ((self._nodes, None), (self._tokens, survival)):
            counts = np.bincount(cells, weights=weights, minlength=sums.size)
            sums += share * (counts.reshape(sums.shape) / num_texts - sums)

    @property
    def num_turns(self) -> int:
        """Number of turns that it has learned from."""
        return int(self._turns[0])

    @property
    def trust(self) -> float:
        """The share of the promised tokens that is accepted.

        It is below 1 even if survivals are calibrated, because the nodes with the greatest
        survivals are chosen.
        """
        return min(self.kept.ratio(1.0), 1.0)

    def values(self, weights: Floats, prices: Prices) -> Floats:
        """Return the weighted tokens that each of SIZES brings beyond a plain step, less the price
        of verifying: float64[SIZES], 0 where nothing is known.  weights: of each text's tokens."""
        nodes = len(weights) * self._nodes.cumsum(axis=0).cumsum(axis=1)
        tokens = self.trust * float(weights.sum()) * self._tokens.cumsum(axis=0).cumsum(axis=1)
        extra_s = np.interp(nodes, NODE_EDGES, prices.extra_s)
        values: Floats = np.maximum((tokens - prices.rate * extra_s).max(axis=1), 0.0)
        return np.where(self._turns > 0, values, 0.0)

    def export(self) -> list[list[float]]:
        """Return what was learned as plain values."""
        return evidence.exported(self._nodes, self._tokens, self._turns)

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        evidence.restore(state, self._nodes, self._tokens, self._turns)
        self.tried.num_done = self.num_turns
