"""Checks of a work's or a caller's nodes against a sequence's live nodes."""

from __future__ import annotations

from collections.abc import Sequence as Indices

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.engine.memory.sequence import Sequence
from cluster.engine.work import Work
from cluster.errors import ProtocolError


def starts_with(sequence: Sequence, work: Work) -> bool:
    """True if the live nodes begin with the work's cached nodes."""
    count, live = work.num_cached_nodes, sequence.tree
    if count > len(live):
        return False
    return bool(
        np.array_equal(live.token_ids[:count], work.tree.token_ids[:count])
        and np.array_equal(live.parents[:count], work.tree.parents[:count])
    )


def check_retained(tree: TokenTree, path: Indices[int], keep: Indices[int]) -> TokenArray:
    """The kept nodes' new parents; raises ProtocolError where path or keep is none of the tree."""
    parent = -1
    for node in path:
        if not 0 <= node < len(tree) or tree.parents[node] != parent:
            raise ProtocolError(
                f"path {list(path)} is no path from the context in a tree of {len(tree)} live nodes"
            )
        parent = int(node)
    renumbered = {parent: -1}
    new_parents = np.empty(len(keep), dtype=np.int32)
    former = -1
    for index, node in enumerate(keep):
        if not former < node < len(tree) or int(tree.parents[node]) not in renumbered:
            raise ProtocolError(
                f"kept node {node} is out of order, or neither its parent is kept nor the end of "
                f"the path ({len(tree)} live nodes)"
            )
        new_parents[index] = renumbered[int(tree.parents[node])]
        renumbered[int(node)] = index
        former = node
    return new_parents
