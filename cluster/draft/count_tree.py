"""Grows trees best-first from counted continuations, for all count-based drafters."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, SamplingParams, TokenTree
from cluster.draft.coupling import count_conditionals, is_useful
from cluster.draft.hit_rates import HitRates

Context = TypeVar("Context")


@dataclass(frozen=True, slots=True, eq=False)
class Continuations(Generic[Context]):
    """The tokens that followed a context so far.

    evidence: strength of the match.  token_ids: distinct, at least one.  counts: their positive
    weights.  contexts: the context after each token.
    """

    evidence: int
    token_ids: Sequence[int]
    counts: Sequence[float]
    contexts: Sequence[Context]


@dataclass(frozen=True, slots=True, eq=False)
class CountTree:
    """A finished tree.

    evidence, known: per node, the root last.  evidence: strength of the match there (0 = none).
    known: all tokens of its continuations, whether or not they became nodes.
    """

    tree: TokenTree
    survival: FloatArray
    evidence: Sequence[int]
    known: Sequence[frozenset[int]]

    def lessons(self, token_ids: Sequence[int]) -> list[tuple[int, bool]]:
        """(evidence, hit) of every node on the path of the committed `token_ids`, root first."""
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(self.tree.parents.tolist(), self.tree.token_ids.tolist(), strict=True)
            )
        }
        lessons: list[tuple[int, bool]] = []
        node: int | None = -1
        for token in token_ids:
            if node is None or self.evidence[node] == 0:
                break
            lessons.append((self.evidence[node], token in self.known[node]))
            node = children.get((node, token))
        return lessons


NO_COUNT_TREE = CountTree(EMPTY_TREE, EMPTY_FLOATS, (0,), (frozenset(),))


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """max_nodes: nodes of the tree.  min_survival: less likely nodes are left out."""

    max_nodes: int
    min_survival: float


def grow_count_tree(
    root: Context,
    continuations: Callable[[Context], Continuations[Context] | None],
    params: SamplingParams,
    position: int,
    rates: HitRates,
    limits: GrowthLimits,
) -> CountTree:
    """Grow the tree whose nodes are the most likely ones, best first.

    position: output position of the root's children.  Parents come before children, because a
    child's survival is below its parent's.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    survivals: list[float] = []
    evidence: list[int] = []
    known: list[frozenset[int]] = []
    # (-survival, order of discovery, parent, token, depth, context); the order breaks ties.
    frontier: list[tuple[float, int, int, int, int, Context]] = []
    discovered = 0

    def expand(node: int, survival: float, depth: int, context: Context) -> None:
        nonlocal discovered
        found = continuations(context)
        evidence.append(found.evidence if found else 0)
        known.append(frozenset(found.token_ids) if found else frozenset())
        if found is None:
            return
        conditionals = count_conditionals(
            params, position + depth, found.token_ids, found.counts, rates.rate(found.evidence)
        )
        for token, conditional, after in zip(
            found.token_ids, conditionals, found.contexts, strict=True
        ):
            child = survival * conditional
            if child >= limits.min_survival and is_useful(params, position + depth, token):
                discovered += 1
                heapq.heappush(frontier, (-child, discovered, node, token, depth + 1, after))

    expand(-1, 1.0, 0, root)
    while frontier and len(token_ids) < limits.max_nodes:
        negative, _, parent, token, depth, context = heapq.heappop(frontier)
        token_ids.append(token)
        parents.append(parent)
        survivals.append(-negative)
        expand(len(token_ids) - 1, -negative, depth, context)
    return CountTree(
        TokenTree.of(token_ids, parents),
        np.array(survivals, dtype=np.float32),
        (*evidence[1:], evidence[0]),
        (*known[1:], known[0]),
    )
