"""The worth of drafting: the gain of residents' nodes over the trees that are held without them.

Residents draft in two arms, look-ups alone or look-ups with models, and in four sizes.  For each
arm the distribution of the survival of its r-th best node of a text is learned, which does not
depend on present prices.  From it follows the worth of a size at any price:

    value(m) = max over s of  tokens of the nodes with a survival of at least s among the best m
                              - rate * (T_v(B, their number) - T_v(B, 0))

A mean survival would not suffice: drafts are worth much in few places and little in all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.spec import evidence
from cluster.spec.budget import Prices
from cluster.spec.forest import Floats, Indices
from cluster.spec.step_cost import NODE_EDGES

# Nodes of each text that residents may be asked for.
SIZES = (2, 4, 8, 16)
_NUM_BINS = 20
# Weight of the newest turn: the worth of drafts changes from passage to passage.
_RECENT = 0.1
_FIRST_RANKS = np.array((0, *SIZES[:-1]))  # first rank of the group of ranks that each size adds


class ArmWorth:
    """The nodes that one arm has added, by rank and survival; the latest turns count most."""

    def __init__(self) -> None:
        # Number of nodes per text and turn, by size and by bin of survival, the greatest first.
        self._nodes = np.zeros((len(SIZES), _NUM_BINS))
        self._tokens = np.zeros((len(SIZES), _NUM_BINS))
        self._turns = np.zeros(len(SIZES), dtype=np.int64)

    def learn(self, ranks: Indices, survival: Floats, num_texts: int, size: int) -> None:
        """Learn from a turn in which num_texts texts were asked for trees of `size` nodes.

        ranks, survival: of the nodes that only this arm has proposed; ranks are within each text.
        """
        groups = np.searchsorted(SIZES, ranks, side="right")
        is_counted = groups < len(SIZES)
        groups, survival = groups[is_counted], survival[is_counted]
        bins = np.minimum(((1.0 - survival) * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        cells, shape = groups * _NUM_BINS + bins, self._nodes.shape
        count = shape[0] * shape[1]
        known = size > _FIRST_RANKS
        self._turns += known
        share = (known * np.maximum(1.0 / np.maximum(self._turns, 1), _RECENT))[:, None]
        for sums, weights in ((self._nodes, None), (self._tokens, survival)):
            found = np.bincount(cells, weights=weights, minlength=count).reshape(shape) / num_texts
            sums += share * (found - sums)

    @property
    def num_turns(self) -> int:
        """Number of turns that it has learned from."""
        return int(self._turns[0])

    def values(self, weights: Floats, trust: float, prices: Prices) -> Floats:
        """Return the weighted tokens that each of SIZES brings beyond a plain step, less the price
        of verifying: float64[SIZES], 0 where nothing is known.

        weights: of each text's tokens.  trust: the share of the promised tokens that is accepted.
        """
        nodes = len(weights) * self._nodes.cumsum(axis=0).cumsum(axis=1)
        tokens = trust * float(weights.sum()) * self._tokens.cumsum(axis=0).cumsum(axis=1)
        extra_s = np.interp(nodes, NODE_EDGES, prices.extra_s)
        values: Floats = np.maximum((tokens - prices.rate * extra_s).max(axis=1), 0.0)
        return np.where(self._turns > 0, values, 0.0)

    def export(self) -> list[list[float]]:
        """Return what was learned as plain values."""
        return evidence.exported(self._nodes, self._tokens, self._turns)

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        evidence.restore(state, self._nodes, self._tokens, self._turns)
