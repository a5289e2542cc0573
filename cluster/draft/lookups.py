"""How the drafters that count follow texts and grow trees: the reference of cluster.draft.native.

A drafter's `Source` says what followed the end of a text.  All else is the same for each of them:
what it learns from how texts went on, and how its trees grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from cluster.core import FloatArray, SamplingParams, TokenArray, TokenTree
from cluster.draft.count_tree import (
    NO_COUNT_TREE,
    Continuations,
    CountTree,
    GrowthLimits,
    grow_count_tree,
)
from cluster.draft.hit_rates import HitRates
from cluster.draft.indexed_text import IndexedText

Context = TypeVar("Context")


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


class Source(Protocol[Context]):
    """What drafters look up."""

    def root(self, text: CountedText, position: int) -> Context:
        """The context at the end of the text.  position: output position of the next token."""
        ...

    def continuations(self, text: CountedText, context: Context) -> Continuations[Context] | None:
        """The tokens that followed `context` so far; None if there are none."""
        ...


class Change(NamedTuple):
    """Tokens that follow the first `kept_len` ones of a text; what `rates` learn from them if
    they do learn: whether the newest tree had foreseen them."""

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


@dataclass(frozen=True, slots=True)
class Ways:
    """One of two ways of doing the same.

    open_text: called with the sizes of the n-grams that are indexed.  grow: called with wishes and
    the least survival of a node; it returns as many trees.
    """

    open_text: Callable[[Sequence[int]], Any]
    advance: Callable[[Sequence[Change]], None]
    grow: Callable[[Sequence[Wish], float], Sequence[tuple[TokenTree, FloatArray]]]


def advance(changes: Sequence[Change]) -> None:
    for text, rates, is_lesson, kept_len, token_ids in changes:
        added = token_ids.tolist()
        if is_lesson:
            for evidence, hit in text.grown.lessons(added):
                rates.record(evidence, hit=hit)
        text.grown = NO_COUNT_TREE
        text.num_cuts += kept_len < len(text.tokens)
        text.truncate(kept_len)
        text.append(added)


def grow(wishes: Sequence[Wish], min_survival: float) -> Sequence[tuple[TokenTree, FloatArray]]:
    return [_grown(wish, min_survival) for wish in wishes]


def _grown(wish: Wish, min_survival: float) -> tuple[TokenTree, FloatArray]:
    text, source = wish.text, wish.source
    text.grown = grow_count_tree(
        source.root(text, wish.position),
        lambda context: source.continuations(text, context),
        text.params,
        wish.position,
        wish.rates,
        GrowthLimits(wish.max_nodes, min_survival),
    )
    return text.grown.tree, text.grown.survival


REFERENCE = Ways(CountedText, advance, grow)
