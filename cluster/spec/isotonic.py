"""The non-decreasing sequence nearest to given values."""

from __future__ import annotations

from collections.abc import Sequence


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
