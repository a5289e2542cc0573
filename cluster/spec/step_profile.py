"""The times of a target's steps and residents, which it measures itself before it serves."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cluster.records import frozen
from cluster.spec.forest import Floats
from cluster.spec.isotonic import isotonic


@frozen
class StepProfile:
    """Step times by number of rows.

    rows: numbers of rows of a step, ascending.  times_s: the seconds of such steps.
    Only the ratios between the times are used: the steps of serving are measured too, and the
    times of sizes that have not occurred there follow from measured sizes by these ratios.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[int], times_s: Sequence[float]) -> StepProfile | None:
        """Return a profile; None if there are too few points or a number is not usable."""
        is_sound = (
            len(rows) == len(times_s) >= 2
            and all(a < b for a, b in pairwise(rows))
            and rows[0] > 0
            and all(0.0 < time_s < float("inf") for time_s in times_s)
        )
        if not is_sound:
            return None
        smooth = isotonic(times_s, [1.0] * len(times_s))
        return cls(tuple(rows), tuple(smooth))

    def at(self, rows: Sequence[float] | np.ndarray) -> Floats:
        """Return the seconds for each number of rows, by interpolation; beyond the last point, with
        the slope of the upper half."""
        wanted = np.asarray(rows, dtype=np.float64)
        found = np.interp(wanted, self.rows, self.times_s)
        # The slope is not that of the last two points, which may differ by noise alone.
        half = bisect.bisect_right(self.rows, self.rows[-1] // 2, hi=len(self.rows) - 1) - 1
        first = max(half, 0)
        slope = (self.times_s[-1] - self.times_s[first]) / (self.rows[-1] - self.rows[first])
        return np.asarray(found + np.maximum(wanted - self.rows[-1], 0.0) * slope)


@frozen
class DraftTime:
    """The time of one turn of a resident, by its sequences and its nodes per sequence.

    num_read: number of texts that its model read first.
    """

    num_sequences: int
    num_nodes: int
    drafter: str
    is_look_up: bool
    time_s: float
    num_read: int = 0
