"""What a target's step takes by its number of rows, as it found out itself before it served."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cluster.spec.forest import Floats
from cluster.spec.isotonic import isotonic


@dataclass(frozen=True, slots=True)
class StepProfile:
    """rows: ascending numbers of rows of a step.  times_s: what such steps took, in seconds.

    It tells the shape of the staircase alone: where the steps of serving are measured, those
    count, and what is not measured yet is derived from them by the profile's ratios.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[int], times_s: Sequence[float]) -> StepProfile | None:
        """None where it says nothing: too few points, or numbers that are none."""
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
        """Seconds for each number of rows: interpolated, and beyond the last one in proportion to
        the rows that are added, as in the upper half."""
        wanted = np.asarray(rows, dtype=np.float64)
        found = np.interp(wanted, self.rows, self.times_s)
        # Two neighbours may differ by noise alone.
        half = bisect.bisect_right(self.rows, self.rows[-1] // 2, hi=len(self.rows) - 1) - 1
        first = max(half, 0)
        slope = (self.times_s[-1] - self.times_s[first]) / (self.rows[-1] - self.rows[first])
        return np.asarray(found + np.maximum(wanted - self.rows[-1], 0.0) * slope)


@dataclass(frozen=True, slots=True)
class DraftTime:
    """What a turn of a target's residents took: for so many sequences, nodes of each.

    num_read: texts that models read before.
    """

    num_sequences: int
    num_nodes: int
    with_models: bool
    time_s: float
    num_read: int = 0
