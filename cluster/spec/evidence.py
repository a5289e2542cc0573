"""What all that learns in the control loop shares: its constants, and how it is kept on disk.

The parts read the constants as attributes of this module, so that `benchmarks.replay` can vary them
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# The weight of the newest value in a running mean, which so covers about the last twenty values.
RECENT = 0.05
# Fewer rounds or trees than this are not enough for an estimate.
FEW = 16
# What is known beforehand counts as so many rounds, trees or places.
PRIOR = 2.0


def exported(*arrays: npt.NDArray[Any]) -> list[list[float]]:
    """Return arrays of what was learned as plain numbers."""
    return [each.ravel().tolist() for each in arrays]


def restore(state: Sequence[Sequence[float]], *arrays: npt.NDArray[Any]) -> None:
    """Fill arrays with a result of `exported`; raises ValueError if it has another form."""
    found = [np.array(each, dtype=np.float64) for each in state]
    if [each.shape for each in found] != [(each.size,) for each in arrays]:
        raise ValueError("what was learned is of another form")
    if not all(np.isfinite(each).all() for each in found):
        raise ValueError("what was learned has numbers that are none")
    for own, values in zip(arrays, found, strict=True):
        own[...] = values.reshape(own.shape)


# The non-decreasing sequence nearest to given values.


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Fit by least squares, pooling adjacent violators of the order (Ayer et al. 1955).

    weights: above 0, one per value.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            above_mean, above_weight, above_count = pools.pop()
            mean = (mean * total + above_mean * above_weight) / (total + above_weight)
            total += above_weight
            count += above_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
