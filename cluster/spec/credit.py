"""Whose a draft token is where several drafters had proposed it: counts by drafter then add up."""

from __future__ import annotations

from collections.abc import Sequence


def owners(sources: Sequence[int], order: Sequence[int]) -> list[int]:
    """The drafter for which each node counts: the first one in `order` that had proposed it.

    sources: of each node its drafters, as bits.  order: drafters' numbers, the one with the largest
    weight first.  -1: nobody in `order` had proposed it.
    """
    known: dict[int, int] = {}
    for bits in sources:
        if bits not in known:
            known[bits] = next((place for place in order if bits >> place & 1), -1)
    return [known[bits] for bits in sources]


def counts(numbers: Sequence[int], length: int) -> tuple[int, ...]:
    """How often each number from 0 to length stands there."""
    found = [0] * length
    for number in numbers:
        if 0 <= number < length:
            found[number] += 1
    return tuple(found)
