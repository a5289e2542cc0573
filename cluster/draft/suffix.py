"""Suffix drafts: what followed the last words in this request and in past outputs.

Oliaro et al., "SuffixDecoding" (2024).  Agents, edits and templates repeat what was written
before, word for word and for hundreds of tokens; the longer the agreement, the surer the copy.

The requests of a tenant and task class share their outputs.  Nothing of them can reach another
text, which the target alone draws; but its speed tells of them, so no other tenant's are looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import TokenArray, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.committed_text import gram_keys
from cluster.draft.gram_index import (
    LONGEST_MATCH,
    SEPARATOR,
    GramIndex,
    Match,
    check_at_least,
    check_ngrams,
    match_of,
)
from cluster.draft.prompt_lookup import LookupDrafter, LookupState
from cluster.spec.token_log import TokenLog

_END = token_array([SEPARATOR])


@dataclass(frozen=True, slots=True)
class SuffixOptions:
    """min_ngram, max_ngram: shortest and longest end of the text that is looked up, in tokens.

    max_matches: matches in this request's text, and as many in earlier outputs, that are merged
    into one tree, newest first.  max_tokens: tokens of earlier outputs that one store keeps, at
    about 250 bytes each; when it is full the older half is dropped.  max_stores: number of stores;
    each tenant and task class has its own, and the one unused for longest is dropped.
    min_survival: less likely nodes are left out.
    """

    min_ngram: int = 2
    max_ngram: int = 8
    max_matches: int = 16
    max_tokens: int = 200_000
    max_stores: int = 8
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        check_ngrams(self.min_ngram, self.max_ngram)
        check_at_least(1, max_matches=self.max_matches, max_stores=self.max_stores)
        check_at_least(2, max_tokens=self.max_tokens)


class _Shelf:
    """Outputs one after another in one array, and where their n-grams stand: sizes -> index."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.text = TokenLog()
        self.indices = {size: GramIndex(size) for size in sizes}

    def add(self, token_ids: TokenArray) -> None:
        self.text.append(np.concatenate((token_ids, _END)))
        for index in self.indices.values():
            index.extend(self.text)


class PastOutputs:
    """Outputs of one store, at most max_tokens of them.

    They stand on two shelves; when the newer one is full, the older one is cleared and takes its
    place.  So forgetting costs nothing.
    """

    def __init__(self, options: SuffixOptions) -> None:
        self._half = options.max_tokens // 2
        self._max_matches = options.max_matches
        self._sizes = (options.max_ngram, options.min_ngram)
        self._shelves = [_Shelf(self._sizes)]

    @property
    def num_tokens(self) -> int:
        return sum(len(shelf.text) for shelf in self._shelves)

    def add(self, token_ids: TokenArray) -> None:
        """Keep one output; of one longer than half of the bound, its end.

        token_ids: int32[n].
        """
        token_ids = token_ids[max(len(token_ids) + 1 - self._half, 0) :]
        if len(self._shelves[0].text) + len(token_ids) + 1 > self._half:
            self._shelves = [_Shelf(self._sizes), self._shelves[0]]
        self._shelves[0].add(token_ids)

    def find(self, text: TokenLog) -> list[tuple[TokenArray, list[int]]]:
        """The newest places of the text's end, as `match_of` takes them: those of the longer
        n-gram where there are any, otherwise those of the shorter one."""
        for size in self._sizes:
            if len(text) < size:
                continue
            key = int(gram_keys(text, size, len(text) - 1)[0])
            found = [
                (shelf.text.token_ids, shelf.indices[size].places(key, self._max_matches))
                for shelf in self._shelves
            ]
            if any(places for _, places in found):
                return found
        return []


class SuffixDrafter(LookupDrafter):
    """Looks the end of the text up in the text itself and in what was written before."""

    def __init__(self, context: DrafterContext, options: SuffixOptions) -> None:
        super().__init__(context, options.min_survival, options.min_ngram, options.max_ngram)
        self._max_matches = options.max_matches
        self._outputs = Bounded(lambda: PastOutputs(options), options.max_stores)

    @property
    def num_past_tokens(self) -> int:
        """Tokens of past outputs held over all stores."""
        return sum(outputs.num_tokens for outputs in self._outputs)

    def _root(self, state: LookupState) -> Match:
        tokens = state.text.token_ids
        own = (tokens, state.places(self._max_matches))
        return match_of(tokens, [own, *self._outputs.of(state.circle).find(state.text)])

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`.  The output is kept, with the end of the prompt before it."""
        for request_id in request_ids:
            state = self._requests.pop(request_id)
            if state is not None and state.next_position > 0:
                start = max(state.prompt_len - LONGEST_MATCH, 0)
                self._outputs.of(state.circle).add(state.text.token_ids[start:])
