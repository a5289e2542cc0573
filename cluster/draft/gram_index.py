"""Where the last words of a text stood before, in it or in another, and what came after.

The common part of the drafters that copy: prompt lookup and suffix.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cluster.core import TokenArray
from cluster.draft.committed_text import gram_keys
from cluster.draft.count_tree import Continuations
from cluster.errors import ConfigError
from cluster.spec.token_log import TokenLog

# Matches are compared backwards no further than this: evidence beyond it teaches nothing.
LONGEST_MATCH = 32

# Stands between the texts of one array; no token is negative.
SEPARATOR = -1


def check_ngrams(min_ngram: int, max_ngram: int) -> None:
    """Raises ConfigError unless 1 <= min_ngram <= max_ngram."""
    if not 1 <= min_ngram <= max_ngram:
        raise ConfigError(
            f"min_ngram {min_ngram} and max_ngram {max_ngram}: expected "
            "1 <= min_ngram <= max_ngram",
            param="min_ngram",
        )


def check_at_least(minimum: int, **values: int) -> None:
    """Raises ConfigError that names the first of `values` below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ConfigError(f"{name}: {value} is below {minimum}", param=name)


class GramIndex:
    """Where each n-gram of one growing text stood before: chains, newest place first.

    One dictionary entry per distinct n-gram and one integer per token.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: dict[int, int] = {}  # key of an n-gram -> index of its last token
        self._previous = array("i")  # index of a token -> last token of the same n-gram before

    def extend(self, text: TokenLog) -> None:
        """Index the tokens that were appended since the last call."""
        start = max(len(self._previous), self._size - 1)
        self._previous.extend([-1] * (min(start, len(text)) - len(self._previous)))
        if start >= len(text):
            return
        newest = self._newest
        for index, key in enumerate(gram_keys(text, self._size, start).tolist(), start):
            self._previous.append(newest.get(key, -1))
            newest[key] = index

    def truncate(self, text: TokenLog, length: int) -> None:
        """Forget the tokens from `length` on; `text` still has them."""
        start = max(length, self._size - 1)
        if start < len(self._previous):
            keys = gram_keys(text, self._size, start)[: len(self._previous) - start].tolist()
            for key, previous in zip(reversed(keys), reversed(self._previous[start:]), strict=True):
                if previous < 0:
                    del self._newest[key]
                else:
                    self._newest[key] = previous
        del self._previous[length:]

    def earlier(self, limit: int) -> list[int]:
        """Last tokens of the earlier places of the text's final n-gram, at most `limit`."""
        return self._chain(self._previous[-1] if self._previous else -1, limit)

    def places(self, key: int, limit: int) -> list[int]:
        """Last tokens of the places of the n-gram with this key, newest first, at most `limit`."""
        return self._chain(self._newest.get(key, -1), limit)

    def _chain(self, index: int, limit: int) -> list[int]:
        places: list[int] = []
        while index >= 0 and len(places) < limit:
            places.append(index)
            index = self._previous[index]
        return places


@dataclass(frozen=True, slots=True)
class Match:
    """Places that agree with the end of a request's text and then with `path`.

    places: texts and, in each, where the next token stands; weights: how much each place counts.
    match_len: tokens on which the best of them agrees, the path's included.
    """

    places: tuple[tuple[TokenArray, int], ...]
    weights: tuple[float, ...]
    match_len: int
    path: tuple[int, ...] = ()

    def continuations(self) -> Continuations[Match] | None:
        """What follows at the places; None where none is left."""
        groups: dict[int, tuple[list[tuple[TokenArray, int]], list[float]]] = {}
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
            Match(tuple(places), tuple(weights), self.match_len + 1, (*self.path, token))
            for token, (places, weights) in groups.items()
        ]
        counts = [sum(weights) for _, weights in groups.values()]
        return Continuations(self.match_len, tuple(groups), counts, contexts)


def match_of(end: TokenArray, found: Iterable[tuple[TokenArray, list[int]]]) -> Match:
    """The places that agree longest with `end`, weighted by how long they agree.

    end: int32[n], the text that is to be continued.  found: texts and the indices of the last
    tokens of the places in them.  A token less of agreement halves a place's weight.
    """
    places: list[tuple[TokenArray, int]] = []
    lengths: list[int] = []
    for text, indices in found:
        if indices:
            places.extend((text, index + 1) for index in indices)
            lengths.extend(_agreements(end, text, indices))
    longest = max(lengths, default=0)
    return Match(tuple(places), tuple(0.5 ** (longest - n) for n in lengths), longest)


def _agreements(end: TokenArray, text: TokenArray, indices: list[int]) -> list[int]:
    """How many tokens up to and including text[index], for each index, equal those that end `end`;
    at most LONGEST_MATCH."""
    reach = min(LONGEST_MATCH, len(end))
    back = np.array(indices)[:, None] - np.arange(reach)
    equal = (text[np.maximum(back, 0)] == end[len(end) - 1 :: -1][:reach]) & (back >= 0)
    lengths = np.where(equal.all(axis=1), reach, np.argmin(equal, axis=1))
    return [int(length) for length in lengths]
