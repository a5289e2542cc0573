"""Credits each draft token to one of its drafters, so that the counts by drafter add up."""

from __future__ import annotations

from collections.abc import Sequence


def owners(sources: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the drafter that each node is credited to: the first one in `order` that proposed it.

    sources: each node's drafters, as bits.  order: drafters' numbers, the one with the largest
    weight first.  The result is -1 for a node that no drafter in `order` had proposed.
    """
    return [next((place for place in order if bits >> place & 1), -1) for bits in sources]
