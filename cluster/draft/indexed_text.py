"""Where the last words of a text stood before, in it or in another, and what came after.

The reference of what native/texts.cpp and native/grow.cpp do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from cluster.draft.coupling import COUNT_TRUST
from cluster.records import frozen, record

# Matches are compared backwards no further than this: evidence beyond it teaches nothing.
LONGEST_MATCH = 32

# Stands between the texts of one array; no token is negative.
SEPARATOR = -1


class IndexedText:
    """Tokens that are appended and cut off at the end, and where their n-grams stand.

    sizes: of the n-grams, the longest first.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        # Size -> n-gram -> lengths of the text at its ends, ascending.
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {size: {} for size in sizes}

    def append(self, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            self.tokens.append(token)
            for ends in self._final_ends():
                ends.append(len(self.tokens))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        while len(self.tokens) > length:
            for ends in self._final_ends():
                ends.pop()
            self.tokens.pop()

    def _final_ends(self) -> list[list[int]]:
        """Of the n-grams that end with the text."""
        return [
            ends.setdefault(tuple(self.tokens[-size:]), [])
            for size, ends in self._ends.items()
            if len(self.tokens) >= size
        ]

    def after(self, size: int, end: Sequence[int], limit: int) -> list[int]:
        """Indices of the tokens that follow the last `size` of `end` here, newest first, at most
        `limit` of them."""
        if len(end) < size:
            return []
        found = self._ends[size].get(tuple(end[-size:]), [])
        # A text's own end is followed by nothing.
        newest = found[:-1] if found and found[-1] == len(self.tokens) else found
        return newest[-limit:][::-1]


@record
class Continuations:
    """The tokens that followed a context so far.

    evidence: strength of the match.  token_ids: distinct, at least one.  counts: their positive
    weights.  contexts: the context after each token.  trust: see `count_conditionals`.
    """

    evidence: int
    token_ids: Sequence[int]
    counts: Sequence[float]
    contexts: Sequence[Context]
    trust: float = COUNT_TRUST


class Context(Protocol):
    """Words that something is known to have followed."""

    def continuations(self) -> Continuations | None:
        """The tokens that followed so far; None if there are none."""
        ...


@frozen
class Match:
    """Places that agree with the end of a request's text and then with `path`.

    places: texts and, in each, where the next token stands; weights: how much each place counts.
    match_len: tokens on which the best of them agrees, the path's included.
    """

    places: Sequence[tuple[Sequence[int], int]]
    weights: Sequence[float]
    match_len: int
    path: tuple[int, ...] = ()

    def continuations(self) -> Continuations | None:
        """The tokens that follow at the places; None where none is left."""
        groups: dict[int, tuple[list[tuple[Sequence[int], int]], list[float]]] = {}
        for (text, index), weight in zip(self.places, self.weights, strict=True):
            # A place near the end of the request's own text runs on into the draft itself; it
            # never runs out, for it lags behind the path it follows.
            token = int(text[index]) if index < len(text) else self.path[index - len(text)]
            if token != SEPARATOR:
                places, weights = groups.setdefault(token, ([], []))
                places.append((text, index + 1))
                weights.append(weight)
        if not groups:
            return None
        contexts = [
            Match(places, weights, self.match_len + 1, (*self.path, token))
            for token, (places, weights) in groups.items()
        ]
        counts = [sum(weights) for _, weights in groups.values()]
        return Continuations(self.match_len, tuple(groups), counts, contexts)


def match_of(end: Sequence[int], found: Iterable[tuple[Sequence[int], list[int]]]) -> Match:
    """The places that agree longest with `end`, weighted by how long they agree.

    end: the text that is to be continued.  found: texts, and in each the indices of the tokens that
    may follow.  A token less of agreement halves a place's weight.
    """
    places = [(text, index) for text, indices in found for index in indices]
    lengths = [agreement(end, text, index) for text, index in places]
    longest = max(lengths, default=0)
    return Match(places, [0.5 ** (longest - length) for length in lengths], longest)


def agreement(end: Sequence[int], text: Sequence[int], index: int) -> int:
    """How many tokens before text[index] are those that end `end`, at most LONGEST_MATCH."""
    reach = min(LONGEST_MATCH, len(end), index)
    length = 0
    while length < reach and text[index - 1 - length] == end[-1 - length]:
        length += 1
    return length
