"""Chooses the leaves of several growing trees that the next forward pass expands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

from cluster.draft.tree_request import TreeRequest

Request = TypeVar("Request", bound=TreeRequest)


def choose_leaves(
    requests: Sequence[tuple[Request, int, float]], num_rows: int
) -> list[tuple[Request, list[int]]]:
    """The `num_rows` leaves with the highest survival over all requests.

    requests: each with the maximum number of expanded nodes of its tree, and the least survival of
    a leaf that is chosen.  Returns each request that has chosen leaves, with their indices in
    ascending order.
    """
    # (-survival, index): the best leaf of each request.
    best = [
        (-request.tree.best_leaf_survival(), index)
        for index, (request, _, least) in enumerate(requests)
        if request.tree is not None and request.tree.best_leaf_survival() >= least
    ]
    heapq.heapify(best)
    chosen: dict[int, list[int]] = {}
    while best and num_rows > 0:
        index = best[0][1]
        request, max_nodes, least = requests[index]
        tree = request.tree
        assert tree is not None
        leaves = chosen.setdefault(index, [])
        leaves.append(tree.pop_leaf())
        num_rows -= 1
        survival = tree.best_leaf_survival()
        if tree.num_slots + len(leaves) < max_nodes and survival >= least:
            heapq.heapreplace(best, (-survival, index))
        else:
            heapq.heappop(best)
    # Sorted, so that parents come before children in the engine as they do in the tree.
    return [(requests[index][0], sorted(leaves)) for index, leaves in chosen.items()]
