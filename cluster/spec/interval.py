"""Means of few measurements, and differences of means, with how sure they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cluster.records import frozen
from cluster.spec.tree import Floats

# Student's t at 97.5 % by degrees of freedom; beyond the table the last entry, which is larger.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


@frozen
class Interval:
    """A mean and its two-sided 95 % interval by Student's t; None for a single value."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def is_telling(self) -> bool:
        """True if the whole interval of a ratio is on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        around = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.mean:.2f}{around}"

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """values: at least one."""
        return cls.of_strata([values])

    @classmethod
    def of_strata(cls, strata: Sequence[Sequence[float]]) -> Interval:
        """The mean of the strata's means; each stratum varies about a mean of its own.

        strata: at least one value each.
        """
        count = sum(map(len, strata))
        mean = math.fsum(math.fsum(values) / len(values) for values in strata) / len(strata)
        if any(len(values) == 1 for values in strata):
            return cls(mean, None, None, count)
        variance = math.fsum(_variance(values) / len(values) for values in strata)
        freedom = count - len(strata)
        half = _T[min(freedom, len(_T)) - 1] * math.sqrt(variance) / len(strata)
        return cls(mean, mean - half, mean + half, count)

    @classmethod
    def of_ratios(cls, strata: Sequence[Sequence[float]]) -> Interval:
        """The geometric mean, for values above 0; strata as in `of_strata`."""
        logs = cls.of_strata([[math.log(value) for value in values] for values in strata])
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return cls(math.exp(logs.mean), low, high, logs.count)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


# The lead of one drafter over another: the accepted tokens of a step with it, less the other's.
#
# A step accepts a stretch of the text at once, so of each drafter only those places count at
# which a step with it would have begun (as in `cluster.spec.acceptance`). These differ, so the
# lead is the difference of two ratios, accepted tokens by places. Places of one text resemble
# each other, so the standard error comes from whole stretches of text, as of clusters (Cochran
# 1977, section 6).


# Of the candidate, places and accepted tokens; of the former, places and accepted tokens.
Stretch = tuple[float, ...]
NOTHING: Stretch = (0.0, 0.0, 0.0, 0.0)


def moments(stretch: Stretch) -> Floats:
    """Return what is summed over stretches: the values, and their products."""
    values: Floats = np.array(stretch, dtype=np.float64)
    return np.concatenate((values, np.outer(values, values).ravel()))


def lead_of(sums: Floats) -> tuple[float, float]:
    """Return (the lead in tokens a step, its standard error).  sums: of `moments`."""
    new_places, new_total, old_places, old_total = sums[:4].tolist()
    if not (new_places and old_places):
        return 0.0, math.inf
    new, old = new_total / new_places, old_total / old_places
    # By how much a stretch moves each ratio, to first order.
    slopes: Floats = np.array(
        [-new / new_places, 1.0 / new_places, old / old_places, -1.0 / old_places]
    )
    variance = float(slopes @ sums[4:].reshape(4, 4) @ slopes)
    return new - old, math.sqrt(max(variance, 0.0))
