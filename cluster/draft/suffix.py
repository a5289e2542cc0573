"""Suffix drafts: what followed the last words in this request and in past outputs.

Oliaro et al., "SuffixDecoding" (2024).  Agents, edits and templates repeat what was written
before, word for word and for hundreds of tokens; the longer the agreement, the surer the copy.

The requests of a tenant and task class share their outputs.  Nothing of them can reach another
text, which the target alone draws; but its speed tells of them, so no other tenant's are looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import ClassVar

from cluster.config.parse import NonNegativeInt, PositiveInt, Share
from cluster.core import TokenArray
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import by_key
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.indexed_text import (
    LONGEST_MATCH,
    SEPARATOR,
    IndexedText,
    Match,
    match_of,
)
from cluster.draft.lookups import CountedText
from cluster.draft.native import lookups as native
from cluster.errors import ConfigError
from cluster.records import frozen


@frozen
class SuffixOptions:
    """Copies of what followed the same words, in this request's text and in earlier outputs."""

    min_ngram: PositiveInt = 1
    """Shortest end of the text that is looked up, in tokens."""
    max_ngram: PositiveInt = 8
    """Longest end of the text that is looked up, in tokens."""
    max_matches: PositiveInt = 16
    """Matches in this request's text, and as many in earlier outputs, that are merged into one
    tree, newest first."""
    max_tokens: NonNegativeInt = 200_000
    """Tokens of earlier outputs that one store keeps, at about 100 bytes each, 0 = none; when it is
    full the older half is dropped."""
    max_stores: PositiveInt = 8
    """Number of stores; each tenant and task class has its own, and the one unused for longest is
    dropped."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""

    def __post_init__(self) -> None:
        if self.min_ngram > self.max_ngram:
            raise ConfigError.at(
                "min_ngram", f"{self.min_ngram} exceeds max_ngram, {self.max_ngram}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The n-grams that are indexed, the longest first.

        Two suffice: for lengths in between, the tokens before a match are compared."""
        return tuple(dict.fromkeys((self.max_ngram, self.min_ngram)))


class PastOutputs:
    """Outputs of one store, at most max_tokens of them; a `Source`.

    They stand on two shelves; when the newer one is full, the older one is cleared and takes its
    place.  So forgetting costs nothing.  native/outputs.cpp does the same.
    """

    def __init__(self, sizes: Sequence[int], max_tokens: int, max_matches: int) -> None:
        self._half = max_tokens // 2
        self._max_matches = max_matches
        self._sizes = sizes
        self._shelves = [IndexedText(sizes)]

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(len(shelf.tokens) for shelf in self._shelves)

    def keep(self, token_ids: TokenArray) -> None:
        """Keep one output; of one longer than half of the bound, its end."""
        kept = token_ids[max(len(token_ids) + 1 - self._half, 0) :].tolist()
        if not kept:
            return
        if len(self._shelves[0].tokens) + len(kept) + 1 > self._half:
            self._shelves = [IndexedText(self._sizes), self._shelves[0]]
        self._shelves[0].append(chain(kept, (SEPARATOR,)))

    def root(self, text: CountedText, position: int) -> Match:
        """The newest places of the text's end: those of the longer n-gram where there are any,
        otherwise those of the shorter one; in the text itself, and apart from it in outputs."""
        found = (*self._found([text], text.tokens), *self._found(self._shelves, text.tokens))
        return match_of(text.tokens, found)

    def _found(
        self, places: Sequence[IndexedText], end: Sequence[int]
    ) -> list[tuple[list[int], list[int]]]:
        for size in self._sizes:
            found = [(each.tokens, each.after(size, end, self._max_matches)) for each in places]
            if any(indices for _, indices in found):
                return found
        return []


class SuffixDrafter(CountDrafter[CountState]):
    """Looks the end of the text up in the text itself and in what was written before."""

    def __init__(self, context: DrafterContext, options: SuffixOptions) -> None:
        ways, outputs = native.fastest(PastOutputs, native.PastOutputs)
        sizes = options.sizes
        super().__init__(context, options.min_survival, CountState.opened_by, ways, sizes)
        self._outputs = by_key(
            lambda: outputs(sizes, options.max_tokens, options.max_matches), options.max_stores
        )

    def _source(self, state: CountState) -> object:
        return self._outputs(state.circle)

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`.  The output is kept, with the end of the prompt before it."""
        for request_id in request_ids:
            state = self._requests.pop(request_id)
            if state is not None and state.next_position > 0:
                start = max(state.prompt_len - LONGEST_MATCH, 0)
                self._outputs(state.circle).keep(state.text.token_ids[start:])


# Kinds that are settings of `suffix`.


@frozen
class PromptLookupOptions(SuffixOptions):
    """Suffix drafts from the request's own text alone: Saxena, "Prompt lookup decoding" (2023)."""

    max_ngram: PositiveInt = 5
    """Longest end of the text that is looked up, in tokens."""
    max_tokens: NonNegativeInt = 0
    """Tokens of earlier outputs that one store keeps, as in `suffix`; none by default."""


@frozen
class NgramCacheOptions(SuffixOptions):
    """Suffix drafts for texts that share words rather than passages."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "max_contexts": "set max_tokens to half of it",
        "max_continuations": "set max_matches to twice of it, at most 16",
    }

    max_ngram: PositiveInt = 4
    """Longest end of the text that is looked up, in tokens."""
    max_tokens: NonNegativeInt = 100_000
    """Tokens of earlier outputs that one store keeps, as in `suffix`; half as many by default."""
