"""The lead of one drafter over another: the accepted tokens of a step with it, less the other's.

A step accepts a stretch of the text at once, so of each drafter only those places count at which a
step with it would have begun (as in `cluster.spec.acceptance`).  These differ, so the lead is the
difference of two ratios, accepted tokens by places.  Places of one text resemble each other, so the
standard error comes from whole stretches of text, as of clusters (Cochran 1977, section 6).
"""

from __future__ import annotations

import math

import numpy as np

from cluster.spec.forest import Floats

# Of the candidate, places and accepted tokens; of the former, places and accepted tokens.
Stretch = tuple[float, ...]
# Numbers of `moments`.
SIZE = 20


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
