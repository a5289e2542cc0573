"""Records of the drafters inside a target, as its control loop sees them."""

from __future__ import annotations

from cluster.records import frozen

# The mask of all residents.
EVERYONE = -1


@frozen
class Resident:
    """A drafter inside the target.

    number: its place among the target's residents.  is_look_up: it runs no model.
    """

    number: int
    name: str
    is_look_up: bool

    @property
    def bit(self) -> int:
        """Its bit in a mask of residents."""
        return 1 << self.number
