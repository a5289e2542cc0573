"""Checks trees that come from outside; every boundary uses this check.

The wire codec, the draft worker, the coordinator's drafter pool and the target use only
this module, so a tree that one of them refuses is refused by all.  The code behind these boundaries
relies on the check: it follows parents without bounds checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.core import FloatArray, Proposal, TokenTree
from cluster.errors import ProtocolError
from cluster.spec.native import trees as native
from cluster.spec.token_log import TokenLog

# The vocabulary size of a peer that does not know the target's: only int32 then bounds the ids.
ANY_VOCABULARY = 0
# No useful tree is larger, and the time of a merge grows with the square of a tree's breadth.
MAX_PROPOSED_NODES = 1024
# By rounding, a product of probabilities may slightly exceed one or its own factors.
MOST_OF_ITS_FACTOR = 1.001
GROWTH = 1e-6

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
# The greatest of a proposal's whole numbers, as the wire carries them.
_MOST = {
    "generation": np.iinfo(np.uint64).max,
    "base_len": np.iinfo(np.uint32).max,
    "prefix_hash": np.iinfo(np.uint64).max,
}


def check_tree(tree: TokenTree, vocab_size: int) -> None:
    """Raise ProtocolError, naming the node and its value, unless `tree` is well formed."""
    problem = problem_of_tree(tree, None, vocab_size)
    if problem is not None:
        raise ProtocolError(problem)


def are_sound(trees: Sequence[TokenTree], survivals: Sequence[FloatArray], vocab_size: int) -> bool:
    """True if `problem_of_tree` would find nothing wrong with any of the trees.

    survivals: float32[n] of each tree.
    """
    if any(map(_problem_of_arrays, trees, survivals)):
        return False
    if not any(len(tree.token_ids) for tree in trees):  # as in every plain step
        return True
    if native.is_available():
        bounds = (MOST_OF_ITS_FACTOR, MOST_OF_ITS_FACTOR, GROWTH)
        return native.are_sound(trees, survivals, num_ids(vocab_size), bounds)
    return not any(
        _problem_of_nodes(tree, claimed, vocab_size)
        for tree, claimed in zip(trees, survivals, strict=True)
    )


def problem_of_tree(tree: TokenTree, survival: FloatArray | None, vocab_size: int) -> str | None:
    """Return why a tree may not be used, or None.

    A tree is sound when its arrays are int32, one-dimensional and of equal length, parents stand
    before their children, every token is in [0, vocab_size), and no two siblings have the same
    token.  survival, where it is given: float32, one per node, in [0, 1] and not growing along a
    path, both but for rounding.
    """
    return _problem_of_arrays(tree, survival) or _problem_of_nodes(tree, survival, vocab_size)


def problems_of_proposals(proposals: Sequence[Proposal], vocab_size: int) -> list[str | None]:
    """Return for each proposal, which may be any object, why it may not be used; None = it may."""
    problems = [_problem_of_fields(proposal) for proposal in proposals]
    rest = [each for each, problem in zip(proposals, problems, strict=True) if problem is None]
    trees, survivals = [each.tree for each in rest], [each.survival for each in rest]
    if are_sound(trees, survivals, vocab_size):
        return problems
    return [
        problem or _problem_of_nodes(proposal.tree, proposal.survival, vocab_size)
        for proposal, problem in zip(proposals, problems, strict=True)
    ]


def problem_in_text(proposal: Proposal, tokens: TokenLog) -> str | None:
    """Return why a proposal of the right generation does not fit this text, or None.

    The proposal itself has been checked before.
    """
    if proposal.base_len > len(tokens):
        return f"base_len {proposal.base_len} lies beyond the {len(tokens)} committed tokens"
    if proposal.prefix_hash != tokens.hash_at(proposal.base_len):
        return f"the prefix hash at {proposal.base_len} is not that of the committed tokens"
    return None


def _problem_of_fields(proposal: Proposal) -> str | None:
    """Return the problem of all fields but the nodes, or None; O(1)."""
    if not isinstance(proposal, Proposal):
        return f"a {type(proposal).__name__} is no Proposal"
    if not (isinstance(proposal.request_id, str) and isinstance(proposal.drafter, str)):
        return "request_id and drafter of a proposal are strings"
    if not isinstance(proposal.is_complete, (bool, np.bool_)):
        kind = type(proposal.is_complete).__name__
        return f"is_complete of a proposal is of type {kind}; send True or False"
    for name, largest in _MOST.items():
        value = getattr(proposal, name)
        if not isinstance(value, (int, np.integer)):  # its value may quote a prompt
            return f"{name} of a proposal is of type {type(value).__name__}; send an integer"
        if not 0 <= value <= largest:
            return f"{name} of a proposal is {value}; send an integer in [0, {largest}]"
    problem = _problem_of_arrays(proposal.tree, proposal.survival, needs_survival=True)
    if problem is None and len(proposal.tree.token_ids) > MAX_PROPOSED_NODES:
        count = len(proposal.tree.token_ids)
        return f"a tree has {count} nodes; at most {MAX_PROPOSED_NODES} are of any use"
    return problem


def num_ids(vocab_size: int) -> int:
    """Return the number of token ids that there may be."""
    return vocab_size if vocab_size > 0 else 1 << 31


def _problem_of_arrays(
    tree: TokenTree, survival: FloatArray | None, *, needs_survival: bool = False
) -> str | None:
    if not isinstance(tree, TokenTree):
        return f"a {type(tree).__name__} is no TokenTree"
    tokens, parents = tree.token_ids, tree.parents
    if not (_is_column(tokens, _INT32) and _is_column(parents, _INT32)):
        return "token_ids and parents of a tree are one-dimensional int32 arrays"
    if len(tokens) != len(parents):
        return f"a tree has {len(tokens)} token ids and {len(parents)} parents; send one per id"
    if survival is None and not needs_survival:
        return None
    if survival is None or not _is_column(survival, _FLOAT32):
        return "the survivals of a tree are a one-dimensional float32 array"
    if len(survival) != len(tokens):
        return f"a tree has {len(tokens)} nodes and {len(survival)} survival values; one per node"
    return None


def _is_column(array: object, dtype: np.dtype[Any]) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1


def _problem_of_nodes(tree: TokenTree, survival: FloatArray | None, vocab_size: int) -> str | None:
    """Return the problem of arrays that fit each other, or None.  The native check's reference."""
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    claimed = None if survival is None else survival.tolist()
    most = num_ids(vocab_size)
    edges: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not -1 <= parent < node:
            return (
                f"node {node} has parent {parent}; parents stand before their children, "
                "-1 continues the context"
            )
        if not 0 <= token < most:
            return f"node {node} has token {token}, the target's vocabulary is 0..{most - 1}"
        if (parent, token) in edges:
            return f"node {node} repeats token {token} of a sibling under {parent}"
        edges.add((parent, token))
        if claimed is None:
            continue
        value = claimed[node]
        if not (math.isfinite(value) and 0.0 <= value <= MOST_OF_ITS_FACTOR):
            return f"node {node} has survival {value}, which is no probability; send one in [0, 1]"
        if parent >= 0 and value > MOST_OF_ITS_FACTOR * claimed[parent] + GROWTH:
            return (
                f"node {node} has survival {value}, above {claimed[parent]} of its parent; a path "
                "is emitted at most as often as its beginning"
            )
    return None
