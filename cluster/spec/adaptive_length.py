"""Adaptive draft length: how many nodes of one text a step may verify.

What the budget knows of a drafter comes from former texts; where those repeated themselves it
overrates the next one, and every sequence of the batch pays for nodes that fail.  So a text begins
with a few nodes, and is allowed twice as many as were accepted of late.
"""

from __future__ import annotations

import math

# Nodes beyond twice the accepted ones, and the number of accepted nodes a text starts with.
_LEAST = 4
_BELIEVED = 2.0
# Weight that a step's accepted nodes keep one step later.
_MEMORY = 7 / 8


class AdaptiveDraftLength:
    """Learns the draft length of one text from what was accepted."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent = _BELIEVED

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step that verified num_drafted nodes and accepted num_accepted of them."""
        if num_drafted:
            self._recent = max(float(num_accepted), self._recent * _MEMORY)

    @property
    def max_nodes(self) -> int:
        """Most nodes to verify in the next step: twice the recently accepted ones plus _LEAST."""
        return _LEAST + math.ceil(2.0 * self._recent)
