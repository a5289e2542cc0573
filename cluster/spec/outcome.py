"""Walks a tree along the text that followed it: which of its nodes would have been accepted."""

from __future__ import annotations

import numpy as np

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.forest import Floats, Indices, Mask
from cluster.spec.step_cost import DRAFT_LENGTHS
from cluster.spec.survival import claimed_conditionals
from cluster.spec.tree import walk


@record
class Outcome:
    """The outcome of a tree.

    conditionals, accepted: float64[known], for the nodes whose outcome is known: the claimed
    probability given the parent, and 1 if the node was on the text.  accepted_of_best:
    int64[DRAFT_LENGTHS], the number of accepted nodes among that many of its best ones.
    """

    conditionals: Floats
    accepted: Floats
    accepted_of_best: Indices


def outcome_of(tree: TokenTree, claimed: FloatArray, followed: TokenArray) -> Outcome:
    """Walk a tree along the committed tokens behind its root."""
    on_path, known = _fates(tree, followed)
    accepted = np.zeros(len(tree))
    accepted[on_path] = 1.0
    conditionals = claimed_conditionals(tree.parents, claimed)
    counted = accepted[np.argsort(-claimed, kind="stable")].cumsum()
    of_best = np.zeros(len(DRAFT_LENGTHS), dtype=np.int64)
    if len(counted):
        of_best[:] = counted[np.minimum(DRAFT_LENGTHS, len(counted)) - 1]
    return Outcome(conditionals[known], accepted[known], of_best)


def _fates(tree: TokenTree, followed: TokenArray) -> tuple[list[int], Mask]:
    """Return (the nodes on the text, bool[n]: the nodes whose outcome is known).

    The outcome of a node is known if its parent was reached and a token followed the parent.
    """
    node, matched = walk(tree, followed)
    on_path: list[int] = []
    while node is not None and node >= 0:
        on_path.append(node)
        node = int(tree.parents[node])
    is_reached = np.zeros(len(tree) + 1, dtype=np.bool_)
    is_reached[-1] = True  # parent -1, the context
    is_reached[on_path if matched < len(followed) else on_path[1:]] = True
    return on_path, is_reached[tree.parents]
