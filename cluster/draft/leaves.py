"""Chooses the leaves of several growing trees that the next forward pass expands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

from cluster.draft.tree_request import TreeRequest

Request = TypeVar("Request", bound=TreeRequest)


def choose_leaves(
    requests: Sequence[tuple[Request, int]], num_rows: int, min_survival: float
) -> list[tuple[Request, list[int]]]:
    """The `num_rows` leaves with the highest survival over all requests.

    requests: each with the maximum number of expanded nodes of its tree.  Leaves with a survival
    below min_survival are not chosen.  Returns each request that has chosen leaves, with their
    indices in ascending order.
    """
    # (-survival, index): the best leaf of each request.
    best = [
        (-request.tree.best_leaf_survival(), index)
        for index, (request, _) in enumerate(requests)
        if request.tree is not None
    ]
    heapq.heapify(best)
    chosen: dict[int, list[int]] = {}
    while best and num_rows > 0 and -best[0][0] >= min_survival:
        index = best[0][1]
        request, max_nodes = requests[index]
        tree = request.tree
        assert tree is not None
        leaves = chosen.setdefault(index, [])
        leaves.append(tree.pop_leaf())
        num_rows -= 1
        is_full = tree.num_slots + len(leaves) >= max_nodes
        survival = 0.0 if is_full else tree.best_leaf_survival()
        heapq.heapreplace(best, (-survival, index))
    # Sorted, so that parents come before children in the engine as they do in the tree.
    return [(requests[index][0], sorted(leaves)) for index, leaves in chosen.items()]
