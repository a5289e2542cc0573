"""Prompt lookup: drafts what followed earlier occurrences of the text's last n-gram.

Saxena, "Prompt lookup decoding" (2023); here several earlier matches are merged into a tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core import Commit
from cluster.draft.base import DrafterContext
from cluster.draft.count_drafter import CountDrafter, CountState
from cluster.draft.count_tree import Continuations
from cluster.draft.gram_index import GramIndex, Match, check_at_least, check_ngrams, match_of


@dataclass(frozen=True, slots=True)
class PromptLookupOptions:
    """min_ngram, max_ngram: shortest and longest suffix that is looked up, in tokens.

    max_matches: earlier occurrences that are merged into one tree, newest first.
    min_survival: nodes with a lower survival are left out.
    """

    min_ngram: int = 2
    max_ngram: int = 5
    max_matches: int = 16
    min_survival: float = 0.02

    def __post_init__(self) -> None:
        check_ngrams(self.min_ngram, self.max_ngram)
        check_at_least(1, max_matches=self.max_matches)


@dataclass(slots=True, eq=False)
class LookupState(CountState):
    """One request and the positions of its n-grams.

    Two indices suffice: for lengths in between, the tokens before a match are compared.
    """

    long: GramIndex = field(default_factory=lambda: GramIndex(1))
    short: GramIndex = field(default_factory=lambda: GramIndex(1))

    def places(self, limit: int) -> list[int]:
        """Positions of the last token of earlier occurrences of the text's end, at most `limit`."""
        return self.long.earlier(limit) or self.short.earlier(limit)


class LookupDrafter(CountDrafter[LookupState, Match]):
    """Indexes the text of every request and continues its matches."""

    def __init__(
        self, context: DrafterContext, min_survival: float, min_ngram: int, max_ngram: int
    ) -> None:
        super().__init__(context, min_survival, self._opened)
        self._min_ngram, self._max_ngram = min_ngram, max_ngram

    def _opened(self, commit: Commit) -> LookupState:
        state = LookupState.opened_by(commit)
        state.long, state.short = GramIndex(self._max_ngram), GramIndex(self._min_ngram)
        return state

    def _learn(self, state: LookupState, start: int) -> None:
        state.long.extend(state.text)
        state.short.extend(state.text)

    def _unlearn(self, state: LookupState, length: int) -> None:
        state.long.truncate(state.text, length)
        state.short.truncate(state.text, length)

    def _continuations(self, state: LookupState, context: Match) -> Continuations[Match] | None:
        return context.continuations()


class PromptLookupDrafter(LookupDrafter):
    """Looks up the end of the text in the text itself; good if outputs copy their prompts."""

    def __init__(self, context: DrafterContext, options: PromptLookupOptions) -> None:
        super().__init__(context, options.min_survival, options.min_ngram, options.max_ngram)
        self._max_matches = options.max_matches

    def _root(self, state: LookupState) -> Match:
        tokens = state.text.token_ids
        return match_of(tokens, [(tokens, state.places(self._max_matches))])
