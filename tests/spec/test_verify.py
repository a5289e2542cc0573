"""The walk over a target's draws, by examples; that it keeps the law is test_law's business."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.core import TokenTree, token_array
from cluster.spec.tree import walk_draws

#   0: a(5) - 2: c(7) - 4: e(9)
#   1: b(6) - 3: d(7)
TREE = TokenTree.of([5, 6, 7, 7, 9], [-1, -1, 0, 1, 2])


@pytest.mark.parametrize(
    ("draws", "path", "token_ids"),
    [
        ([8, 7, 7, 9, 0, 0], [], [8]),  # the root draws what no child carries
        ([5, 7, 0, 9, 0, 1], [0, 2, 4], [5, 7, 9, 1]),  # to a leaf, and one more
        ([5, 6, 7, 9, 0, 1], [0], [5, 6]),  # node 2 has the token that node 1 drew, not its own
        ([6, 7, 7, 9, 3, 1], [1, 3], [6, 7, 3]),  # the second branch
        ([5, 7, 0, 8, 0, 1], [0, 2], [5, 7, 8]),
    ],
)
def test_the_walk_goes_on_from_the_child_that_carries_the_draw(
    draws: list[int], path: list[int], token_ids: list[int]
) -> None:
    nodes, emitted = walk_draws(TREE, token_array(draws))
    assert (nodes.tolist(), emitted.tolist()) == (path, token_ids)
    assert nodes.dtype == emitted.dtype == np.int32
