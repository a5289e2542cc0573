"""How many nodes one text may have verified in a step: as many as its drafts have been good for.

What is known of a drafter is known of the texts before this one, and where those repeated
themselves it promises much to the next.  A step of many nodes that all fail is paid by every
sequence of the batch; so a text begins with a few and has them doubled while they are accepted.
"""

from __future__ import annotations

import math

# Nodes beyond twice the accepted ones, and what a text is taken to have had accepted at first.
_LEAST = 4
_BELIEVED = 2.0
# What was accepted in one step counts so much a step later.
_MEMORY = 7 / 8


class Reach:
    """Of one text."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent = _BELIEVED

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """A step verified num_drafted of its nodes; one without any says nothing."""
        if num_drafted:
            self._recent = max(float(num_accepted), self._recent * _MEMORY)

    @property
    def max_nodes(self) -> int:
        """In the next step: twice as many as were accepted of late, and a few more."""
        return _LEAST + math.ceil(2.0 * self._recent)
