"""How the drafters that count follow texts and grow trees: the reference of cluster.draft.native.

A drafter's `Source` says what followed the end of a text.  All else is the same for each of them:
what it learns from how texts went on, and how its trees grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, SamplingParams, TokenArray, TokenTree
from cluster.draft.coupling import count_conditionals, is_useful
from cluster.draft.indexed_text import Context, IndexedText
from cluster.records import frozen, record
from cluster.spec.noise import gumbel
from cluster.spec.params import divisor
from cluster.spec.tree import edges

# How often the continuation of an n-gram match is right, learned from commits.
#
# Count-based drafters know counts, not probabilities. Their survival estimates come from the one
# thing that predicts them well: how strong the match is (its *evidence*: tokens matched, and
# doublings of the count where there is one), and what became of such matches so far.


# Before experience, a match of evidence n is wrong with probability _PRIOR_MISS ** n; the prior
# weighs as much as _PRIOR_WEIGHT observations, and old ones fade with a memory of _MEMORY.
_PRIOR_MISS = 0.7
_PRIOR_WEIGHT = 8.0
_MEMORY = 2000.0
_STRONGEST = 32


class HitRates:
    """Probability that the target's next token is among the continuations of a match.

    Evidence beyond 32 counts as 32.  address: of hits and then trials, for native code; valid as
    long as this object lives.
    """

    def __init__(self) -> None:
        prior = 1.0 - _PRIOR_MISS ** np.arange(_STRONGEST + 1)
        self._counts = np.stack((_PRIOR_WEIGHT * prior, np.full_like(prior, _PRIOR_WEIGHT)))
        self._hits, self._trials = self._counts
        self.address = self._counts.ctypes.data

    def rate(self, evidence: int) -> float:
        """In [0.005, 0.995]; below 1, so that survival falls along every path."""
        level = min(evidence, _STRONGEST)
        return min(max(float(self._hits[level] / self._trials[level]), 0.005), 0.995)

    def record(self, evidence: int, *, hit: bool) -> None:
        level = min(evidence, _STRONGEST)
        if self._trials[level] >= _MEMORY:
            self._counts[:, level] *= 0.5
        self._counts[:, level] += (hit, 1.0)


@record
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
        children = edges(self.tree)
        lessons: list[tuple[int, bool]] = []
        node: int | None = -1
        for token in token_ids:
            if node is None or self.evidence[node] == 0:
                break
            lessons.append((self.evidence[node], token in self.known[node]))
            node = children.get((node, token))
        return lessons


NO_COUNT_TREE = CountTree(EMPTY_TREE, EMPTY_FLOATS, (0,), (frozenset(),))


class CountedText(IndexedText):
    """The text of one request, and the newest tree behind it.

    num_cuts: how often tokens of it were taken back.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        super().__init__(sizes)
        self.num_cuts = 0
        self.params = SamplingParams()
        self.grown: CountTree = NO_COUNT_TREE

    def set_law(self, params: SamplingParams) -> None:
        """Trees are from now on grown for these parameters."""
        self.params = params

    def draws(self, position: int, token_ids: TokenArray, logprobs: FloatArray) -> list[int]:
        """The target's draws at positions from this one on, each of the likely tokens there.

        token_ids, logprobs: [positions, tokens], the most probable token first."""
        params, best = self.params, np.zeros(len(token_ids), np.int64)
        if params.temperature > 0.0 and position >= 0:
            places = np.arange(position, position + len(token_ids))[:, None]
            noise = gumbel(params.noise_key, places, token_ids, params.stream)
            best = (logprobs.astype(np.float64) / divisor(params) + noise).argmax(axis=1)
        said: list[int] = token_ids[np.arange(len(best)), best].tolist()
        return said


class Source(Protocol):
    """Where drafters look up how a text goes on."""

    def root(self, text: CountedText, position: int) -> Context:
        """The context at the end of the text.  position: output position of the next token."""
        ...


class Change(NamedTuple):
    """Tokens that follow the first `kept_len` ones of a text.

    is_lesson: `rates` learn how many of them the newest tree had foreseen.
    """

    text: Any
    rates: HitRates
    is_lesson: bool
    kept_len: int
    token_ids: TokenArray


class Wish(NamedTuple):
    """A tree of at most `max_nodes` nodes.  position: output position of its first level."""

    text: Any
    source: Any
    rates: HitRates
    position: int
    max_nodes: int


@frozen
class Ways:
    """The functions that follow texts and grow trees, in Python or native.

    open_text: called with the sizes of the n-grams that are indexed.  grow: called with wishes and
    the least survival of a node; it returns as many trees.
    """

    open_text: Callable[[Sequence[int]], Any]
    advance: Callable[[Sequence[Change]], None]
    grow: Callable[[Sequence[Wish], float], Sequence[tuple[TokenTree, FloatArray]]]


def _advance(changes: Sequence[Change]) -> None:
    for text, rates, is_lesson, kept_len, token_ids in changes:
        added = token_ids.tolist()
        if is_lesson:
            for evidence, hit in text.grown.lessons(added):
                rates.record(evidence, hit=hit)
        text.grown = NO_COUNT_TREE
        text.num_cuts += kept_len < len(text.tokens)
        text.truncate(kept_len)
        text.append(added)


def _grow(wishes: Sequence[Wish], min_survival: float) -> Sequence[tuple[TokenTree, FloatArray]]:
    trees = []
    for wish in wishes:
        wish.text.grown = found = _grown(wish, min_survival)
        trees.append((found.tree, found.survival))
    return trees


def _grown(wish: Wish, min_survival: float) -> CountTree:
    """The tree whose nodes are the most likely ones, best first.

    Parents come before children, because a child's survival is below its parent's.
    """
    params: SamplingParams = wish.text.params
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
        found = context.continuations()
        evidence.append(found.evidence if found else 0)
        known.append(frozenset(found.token_ids) if found else frozenset())
        if found is None:
            return
        position, rate = wish.position + depth, wish.rates.rate(found.evidence)
        conditionals = count_conditionals(
            params, position, found.token_ids, found.counts, rate, found.trust
        )
        for token, conditional, after in zip(
            found.token_ids, conditionals, found.contexts, strict=True
        ):
            child = survival * conditional
            if child >= min_survival and is_useful(params, position, token):
                discovered += 1
                heapq.heappush(frontier, (-child, discovered, node, token, depth + 1, after))

    expand(-1, 1.0, 0, wish.source.root(wish.text, wish.position))
    while frontier and len(token_ids) < wish.max_nodes:
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


REFERENCE = Ways(CountedText, _advance, _grow)
