"""How drafters fare in one text, and when something is to be tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.spec import evidence

# The share of the time that each kind of exploration may take.  The kinds are trees of
# other sizes than the one that pays, and models that are not the best for a text.
_EXPLORED_SHARE = 0.003
# The same share for the first explorations of each kind.  It spreads them over a text, because the
# beginning of a text is not typical of the rest.
_FIRST_SHARE = 0.05
# What is known of drafters in all texts counts as so many places of this one.
_PRIOR_PLACES = 2.0
# What an outcome counts after each further token: half after 140 tokens, and in the short memory
# after 14.  Where a drafter brings less than this share of what it brought, the text has changed,
# and its outcomes so far tell nothing of the rest.
_KEPT_SHORT, _KEPT_LONG = 0.95, 0.995
_CHANGED_SHARE = 0.5
_LEAST_OUTCOMES = 8.0


@dataclass(slots=True)
class Turn:
    """One kind of exploration: when it was last done, and how many times so far."""

    done_at: float = -math.inf
    num_done: int = 0

    def is_due(self, now: float, cost_s: float) -> bool:
        """True if its cost is within its share of the time since it was last done."""
        share = _FIRST_SHARE if self.num_done < evidence.FIRST_TRIES else _EXPLORED_SHARE
        return now - self.done_at >= cost_s / share

    def take(self, now: float) -> None:
        self.done_at = now
        self.num_done += 1


class Standing:
    """How the drafters of one text have fared in it.

    An outcome is the accepted of a tree's best few nodes, at a place where a step with them would
    have begun.  turns: by model, of the exploration of those that are not asked.
    """

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}
        # By drafter: the latest place; outcomes and accepted, and both in the short memory.
        self._sums: dict[str, tuple[int, float, float, float, float]] = {}

    def note(self, drafter: str, place: int, accepted: int) -> None:
        """Enter an outcome; place: the length of the text at the tree's root."""
        known_at, num, total, num_late, late = self._sums.get(drafter, (place, 0.0, 0.0, 0.0, 0.0))
        age = max(place - known_at, 0)
        kept, kept_late = _KEPT_LONG**age, _KEPT_SHORT**age
        num, total = kept * num + 1.0, kept * total + accepted
        num_late, late = kept_late * num_late + 1.0, kept_late * late + accepted
        self._sums[drafter] = place, num, total, num_late, late
        if num > _LEAST_OUTCOMES and late * num < _CHANGED_SHARE * total * num_late:
            self._sums.clear()
            self.turns.clear()

    def forget(self, drafter: str) -> None:
        """Forget the outcomes of a drafter, which has another model now."""
        self._sums.pop(drafter, None)
        self.turns.pop(drafter, None)

    def expected(self, drafter: str, place: int, prior: float) -> float:
        """Return the tokens to expect of a drafter's best few nodes.  prior: in other texts."""
        known_at, num, total, _, _ = self._sums.get(drafter, (place, 0.0, 0.0, 0.0, 0.0))
        kept = _KEPT_LONG ** max(place - known_at, 0)
        return (_PRIOR_PLACES * prior + kept * total) / (_PRIOR_PLACES + kept * num)
