"""The sizes of steps, in nodes or in sequences, between which cost tables distinguish."""

from __future__ import annotations

import bisect

import numpy as np

# From 2 on an edge is at most half as large again as the one before; kernels' costs jump at such
# sizes.
EDGES: tuple[int, ...] = (0, 1, *(base << power for power in range(10) for base in (2, 3)), 2048)
NODE_EDGES = np.array(EDGES)
# Numbers of nodes of a sequence that residents may be asked for, and for which acceptance is known.
DRAFT_LENGTHS = NODE_EDGES[(NODE_EDGES >= 1) & (NODE_EDGES <= 32)]
# No step commits more tokens of a text.  A model that lacks more of a text has to read it first, so
# the time of that turn is no measurement of drafting.
MAX_COMMIT = int(DRAFT_LENGTHS[-1]) + 1


def bucket(count: int) -> int:
    """Return the smallest edge that is not below `count`, or the last edge if all are below."""
    return EDGES[min(bisect.bisect_left(EDGES, count), len(EDGES) - 1)]
