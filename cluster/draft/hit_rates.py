"""How often the continuation of an n-gram match is right, learned from commits.

Count-based drafters know counts, not probabilities.  Their survival estimates come from the one
thing that predicts them well: how strong the match is (its *evidence*: tokens matched, and
doublings of the count where there is one), and what became of such matches so far.
"""

from __future__ import annotations

# Before experience, a match of evidence n is wrong with probability _PRIOR_MISS ** n; the prior
# weighs as much as _PRIOR_WEIGHT observations, and old ones fade with a memory of _MEMORY.
_PRIOR_MISS = 0.6
_PRIOR_WEIGHT = 8.0
_MEMORY = 2000.0
_STRONGEST = 32


class HitRates:
    """Probability that the target's next token is among the continuations of a match.

    Evidence beyond 32 counts as 32.
    """

    def __init__(self) -> None:
        self._hits = [_PRIOR_WEIGHT * (1.0 - _PRIOR_MISS**level) for level in range(_STRONGEST + 1)]
        self._trials = [_PRIOR_WEIGHT] * (_STRONGEST + 1)

    def rate(self, evidence: int) -> float:
        """In [0.005, 0.995]; below 1, so that survival falls along every path."""
        level = min(evidence, _STRONGEST)
        return min(max(self._hits[level] / self._trials[level], 0.005), 0.995)

    def record(self, evidence: int, *, hit: bool) -> None:
        level = min(evidence, _STRONGEST)
        if self._trials[level] >= _MEMORY:
            self._trials[level] *= 0.5
            self._hits[level] *= 0.5
        self._trials[level] += 1.0
        self._hits[level] += float(hit)
