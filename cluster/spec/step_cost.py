"""Sizes of steps that are told apart: by nodes, and by sequences."""

from __future__ import annotations

import bisect

import numpy as np

# Steps between neighbours are at most a half; kernels' staircases lie at such sizes.
EDGES: tuple[int, ...] = (
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
)  # fmt: skip
NODE_EDGES = np.array(EDGES)
# Of a sequence: what residents may be asked for, and for which it is known what was accepted.
DRAFT_LENGTHS = NODE_EDGES[(NODE_EDGES >= 1) & (NODE_EDGES <= 32)]
# No step commits more tokens of a text: a model that lacks more of it reads it before it drafts,
# which says nothing of what drafting takes.
MAX_COMMIT = int(DRAFT_LENGTHS[-1]) + 1

# By count up to the last edge, where the smallest edge stands that is not below it.
_PLACES = tuple(bisect.bisect_left(EDGES, count) for count in range(EDGES[-1] + 1))


def place(count: int) -> int:
    """Where the smallest edge stands that is not below `count`."""
    return _PLACES[count] if count < len(_PLACES) else len(EDGES) - 1


def bucket(count: int) -> int:
    """The smallest edge that is not below `count`; what lies beyond the last edge is the last."""
    return EDGES[place(count)]
