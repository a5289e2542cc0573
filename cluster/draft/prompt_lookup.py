"""Prompt lookup: what followed the last words the last time they stood in this request.

Saxena, "Prompt lookup decoding" (2023); here with several earlier matches merged into a tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.core import Commit
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import CommittedText, gram_keys
from cluster.draft.count_drafter import CountDrafter, CountState, opening_params
from cluster.draft.count_tree import Continuations
from cluster.errors import ConfigError

# Matches are compared backwards no further than this: evidence beyond it teaches nothing.
_LONGEST_MATCH = 32


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    """min_ngram, max_ngram: shortest and longest suffix that is looked up, in tokens.

    max_matches: earlier places that are merged into one tree, newest first.
    min_survival: less likely nodes are left out.
    """

    min_ngram: int = 2
    max_ngram: int = 5
    max_matches: int = 16
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"min_ngram {self.min_ngram} and max_ngram {self.max_ngram}: expected "
                "1 <= min_ngram <= max_ngram",
                param="min_ngram",
            )
        if self.max_matches < 1:
            raise ConfigError(f"max_matches: {self.max_matches} is below 1", param="max_matches")


class GramIndex:
    """Where each n-gram of one growing text stood before: chains, newest place first.

    One dictionary entry per distinct n-gram and one integer per token.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: dict[int, int] = {}  # key of an n-gram -> index of its last token
        self._previous = array("i")  # index of a token -> last token of the same n-gram before

    def extend(self, text: CommittedText) -> None:
        """Index the tokens that were appended since the last call."""
        start = max(len(self._previous), self._size - 1)
        self._previous.extend([-1] * (min(start, len(text)) - len(self._previous)))
        if start >= len(text):
            return
        newest = self._newest
        for index, key in enumerate(gram_keys(text, self._size, start).tolist(), start):
            self._previous.append(newest.get(key, -1))
            newest[key] = index

    def truncate(self, text: CommittedText, length: int) -> None:
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
        places: list[int] = []
        index = self._previous[-1] if self._previous else -1
        while index >= 0 and len(places) < limit:
            places.append(index)
            index = self._previous[index]
        return places


@dataclass(frozen=True, slots=True)
class _Match:
    """Places that agree with the text's end and then with `path`.

    indices: where the next token of each stands; weights: how much each place counts.
    """

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    match_len: int
    path: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class _LookupState(CountState):
    long: GramIndex = field(default_factory=lambda: GramIndex(1))
    short: GramIndex = field(default_factory=lambda: GramIndex(1))


class PromptLookupDrafter(CountDrafter[_LookupState, _Match]):
    """Looks the end of the text up in the text itself: strong where outputs copy their prompts."""

    def __init__(self, context: DrafterContext, options: PromptLookupOptions) -> None:
        super().__init__(context, options.min_survival)
        self._options = options

    def _opened(self, commit: Commit) -> _LookupState:
        return _LookupState(
            commit.generation,
            commit.prompt_len,
            commit.task,
            opening_params(commit),
            long=GramIndex(self._options.max_ngram),
            short=GramIndex(self._options.min_ngram),
        )

    def _learn(self, state: _LookupState, start: int) -> None:
        state.long.extend(state.text)
        state.short.extend(state.text)

    def _unlearn(self, state: _LookupState, length: int) -> None:
        state.long.truncate(state.text, length)
        state.short.truncate(state.text, length)

    def _root(self, state: _LookupState) -> _Match:
        """The places that agree longest, weighted by how long they agree.

        Two indices suffice: lengths between the two are told apart by comparing backwards.
        """
        limit = self._options.max_matches
        places = state.long.earlier(limit) or state.short.earlier(limit)
        lengths = [_agreement(state.text, place) for place in places]
        longest = max(lengths, default=0)
        weights = tuple(0.5 ** (longest - length) for length in lengths)
        return _Match(tuple(place + 1 for place in places), weights, longest)

    def _continuations(self, state: _LookupState, context: _Match) -> Continuations[_Match] | None:
        if not context.indices:
            return None
        groups: dict[int, tuple[list[int], list[float]]] = {}
        for index, weight in zip(context.indices, context.weights, strict=True):
            indices, weights = groups.setdefault(
                _token_at(state.text, context.path, index), ([], [])
            )
            indices.append(index + 1)
            weights.append(weight)
        contexts = [
            _Match(tuple(indices), tuple(weights), context.match_len + 1, (*context.path, token))
            for token, (indices, weights) in groups.items()
        ]
        counts = [sum(weights) for _, weights in groups.values()]
        return Continuations(context.match_len, tuple(groups), counts, contexts)


def _token_at(text: CommittedText, path: Sequence[int], index: int) -> int:
    """The token at `index` of text + path: a place near the end runs on into the draft itself.

    It never runs out: a place stands before the end, so it lags behind the path it follows.
    """
    return int(text.token_ids[index]) if index < len(text) else path[index - len(text)]


def _agreement(text: CommittedText, place: int) -> int:
    """How many tokens up to and including `place` equal those that end the text."""
    count = min(place + 1, _LONGEST_MATCH)
    tokens = text.token_ids
    equal = tokens[place + 1 - count : place + 1] == tokens[len(tokens) - count :]
    differing = np.flatnonzero(~equal)
    return count - 1 - int(differing[-1]) if len(differing) else count
