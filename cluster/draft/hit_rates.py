"""How often the continuation of an n-gram match is right, learned from commits.

Count-based drafters know counts, not probabilities.  Their survival estimates come from the one
thing that predicts them well: how strong the match is (its *evidence*: tokens matched, and
doublings of the count where there is one), and what became of such matches so far.
"""

from __future__ import annotations

import numpy as np

# Before experience, a match of evidence n is wrong with probability _PRIOR_MISS ** n; the prior
# weighs as much as _PRIOR_WEIGHT observations, and old ones fade with a memory of _MEMORY.
_PRIOR_MISS = 0.7
_PRIOR_WEIGHT = 8.0
_MEMORY = 2000.0
_STRONGEST = 32


class HitRates:
    """Probability that the target's next token is among the continuations of a match.

    Evidence beyond 32 counts as 32.  address: of hits and then trials, for native code; valid as
    long as this object lives.
    """

    def __init__(self) -> None:
        prior = 1.0 - _PRIOR_MISS ** np.arange(_STRONGEST + 1)
        self._counts = np.stack((_PRIOR_WEIGHT * prior, np.full_like(prior, _PRIOR_WEIGHT)))
        self._hits, self._trials = self._counts
        self.address = self._counts.ctypes.data

    def rate(self, evidence: int) -> float:
        """In [0.005, 0.995]; below 1, so that survival falls along every path."""
        level = min(evidence, _STRONGEST)
        return min(max(float(self._hits[level] / self._trials[level]), 0.005), 0.995)

    def record(self, evidence: int, *, hit: bool) -> None:
        level = min(evidence, _STRONGEST)
        if self._trials[level] >= _MEMORY:
            self._counts[:, level] *= 0.5
        self._counts[:, level] += (hit, 1.0)
