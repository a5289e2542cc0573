"""Whose a draft token is where several drafters had proposed it: counts by drafter then add up."""

from __future__ import annotations

import numpy as np

from cluster.core import FloatArray
from cluster.spec.forest import Indices, Mask


def is_proposed(claimed: FloatArray) -> Mask:
    """bool[drafters, nodes] of float32[drafters, nodes]: NaN where it did not propose the node."""
    proposed: Mask = claimed == claimed  # NaN is not itself
    return proposed


def owners(proposed: Mask) -> Indices:
    """The drafter for which each node counts: the first of those that had proposed it.

    proposed: bool[drafters, nodes], the drafter with the largest weight first.  Every node has one.
    """
    found: Indices = proposed.argmax(axis=0)
    return found


def credited(proposed: Mask) -> tuple[list[int], list[int]]:
    """How many nodes count for each drafter, and how many it had proposed that count for another.

    The first add up to the number of nodes.
    """
    own = np.bincount(owners(proposed), minlength=len(proposed))
    return own.tolist(), (proposed.sum(axis=1) - own).tolist()
