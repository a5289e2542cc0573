"""Means of few measurements, with how sure they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from cluster.records import frozen

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
    def told(self) -> str:
        """A ratio for people."""
        return f"{self}{'' if self.is_telling else ': cannot tell'}"

    @property
    def is_telling(self) -> bool:
        """True if the whole interval of a ratio is on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        around = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.mean:.2f}{around}"

    @classmethod
    def of_strata(cls, strata: Sequence[Sequence[float]]) -> Interval:
        """The mean of the strata's means; each stratum varies about a mean of its own.

        strata: at least one value each.
        """
        count = sum(map(len, strata))
        mean = statistics.fmean(map(statistics.fmean, strata))
        if any(len(values) == 1 for values in strata):
            return cls(mean, None, None, count)
        variance = math.fsum(statistics.variance(values) / len(values) for values in strata)
        freedom = count - len(strata)
        half = _T[min(freedom, len(_T)) - 1] * math.sqrt(variance) / len(strata)
        return cls(mean, mean - half, mean + half, count)

    @classmethod
    def of_ratios(cls, strata: Sequence[Sequence[float]]) -> Interval:
        """The geometric mean, for values above 0; strata as in `of_strata`."""
        logs = cls.of_strata([[math.log(value) for value in values] for values in strata])
        low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
        return cls(math.exp(logs.mean), low, high, logs.count)
