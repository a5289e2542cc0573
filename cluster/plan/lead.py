"""The lead of one drafter over another: the accepted tokens of a step with it, less the other's.

A step accepts a stretch of the text at once, so of each drafter only those places count at which a
step with it would have begun (as in `cluster.spec.acceptance`).  These differ, so the lead is the
difference of two ratios, accepted tokens by places.  Places of one text resemble each other, so the
standard error comes from whole stretches of text, as of clusters (Cochran 1977, section 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from cluster.spec import evidence

# Of the candidate, places and accepted tokens; of the former, places and accepted tokens.
Stretch = tuple[float, float, float, float]


class Lead:
    """Sums over stretches."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self._known = np.zeros(20)
        self._sums, self._squares = self._known[:4], self._known[4:].reshape(4, 4)
        for each in stretches:
            self.add(each)

    def add(self, stretch: Stretch) -> None:
        values = np.array(stretch)
        self._sums += values
        self._squares += np.outer(values, values)

    def estimate(self) -> tuple[float, float]:
        """Return (the lead in tokens a step, its standard error)."""
        new_places, new_total, old_places, old_total = self._sums.tolist()
        if not (new_places and old_places):
            return 0.0, math.inf
        new, old = new_total / new_places, old_total / old_places
        # By how much a stretch moves each ratio, to first order.
        slopes: npt.NDArray[np.float64] = np.array(
            [-new / new_places, 1.0 / new_places, old / old_places, -1.0 / old_places]
        )
        return new - old, math.sqrt(max(float(slopes @ self._squares @ slopes), 0.0))

    def export(self) -> list[float]:
        """Return the sums as plain numbers."""
        return self._known.tolist()

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a result of `export`; raises ValueError for another form."""
        evidence.restore([state], self._known)
