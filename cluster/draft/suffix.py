"""Copies of what followed the last words in this request and in past outputs, and of the output
that the client predicts; and the base of all drafters that count what they look up.

Oliaro et al., "SuffixDecoding" (2024).  Agents, edits and templates repeat what was written
before, word for word and for hundreds of tokens; the longer the agreement, the surer the copy.

The requests of a tenant and task class share their outputs.  Nothing of them can reach another
text, which the target alone draws; but its speed tells of them, so no other tenant's are looked up.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from cluster.config.parse import NonNegativeInt, PositiveInt, Share, check_that
from cluster.core import Commit, FloatArray, Observation, TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import DraftedRequest, WholeTreeDrafter, by_key
from cluster.draft.native import lookups as native
from cluster.records import frozen

# The common part of count-based drafters: observe, propose, release.
#
# A subclass says what it looks up.  No tokenizer and no torch: such a drafter serves any vocabulary
# and answers within one call.


@dataclass(slots=True, eq=False)
class CountState(DraftedRequest):
    """One request.

    counted: its text as native code follows it.  rates: those of the newest tree.
    """

    counted: Any = None
    rates: native.HitRates = field(default_factory=native.HitRates)


State = TypeVar("State", bound=CountState)


class CountDrafter(WholeTreeDrafter[State]):
    """Proposes one complete tree per commit."""

    is_look_up = True  # see `Drafter`

    def __init__(
        self,
        context: DrafterContext,
        min_survival: float,
        open_request: Callable[[Commit], State],
        sizes: Sequence[int] = (),
    ) -> None:
        """sizes: of the n-grams that are indexed in each text, the longest first."""

        def opened(commit: Commit) -> State:
            state = open_request(commit)
            state.counted = native.CountedText(sizes)
            state.renewed = True
            return state

        super().__init__(context, opened)
        self._min_survival = min_survival
        self._rates = by_key(native.HitRates)
        self._changes: list[native.Change] = []

    @abstractmethod
    def _source(self, state: State) -> native.Source | None:
        """Where this request is looked up; None = nowhere."""

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        observations = super().observe(commits)
        if self._changes:
            changes, self._changes = self._changes, []
            native.advance(changes)
        return observations

    def _forget_tree(self, state: State) -> None:
        super()._forget_tree(state)
        state.counted.set_law(state.params)

    def _advance(self, state: State, kept_len: int, token_ids: TokenArray) -> None:
        """Amortised cost: O(committed tokens)."""
        is_lesson = kept_len == len(state.text) and state.drafted_nodes >= 0
        state.text.truncate(kept_len)
        state.text.append(token_ids)
        state.drafted_nodes = -1
        self._changes.append(
            native.Change(state.counted, state.rates, is_lesson, kept_len, token_ids)
        )

    def _drafts(
        self, asked: Sequence[tuple[State, int]]
    ) -> Iterable[tuple[State, TokenTree, FloatArray]]:
        states: list[State] = []
        wishes: list[native.Wish] = []
        for state, max_nodes in asked:
            position = state.next_position
            source = self._source(state) if position >= 0 else None
            if source is not None:
                state.rates = self._rates(state.group)
                states.append(state)
                wishes.append(native.Wish(state.counted, source, state.rates, position, max_nodes))
        trees = native.grow(wishes, self._min_survival) if wishes else ()
        return [(state, *grown) for state, grown in zip(states, trees, strict=True)]


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
        check_that(
            self.min_ngram <= self.max_ngram,
            "min_ngram",
            f"{self.min_ngram} exceeds max_ngram, {self.max_ngram}",
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The n-grams that are indexed, the longest first.

        Two suffice: for lengths in between, the tokens before a match are compared."""
        return tuple(dict.fromkeys((self.max_ngram, self.min_ngram)))


class SuffixDrafter(CountDrafter[CountState]):
    """Looks the end of the text up in the text itself and in what was written before."""

    def __init__(self, context: DrafterContext, options: SuffixOptions) -> None:
        sizes = options.sizes
        super().__init__(context, options.min_survival, CountState.opened_by, sizes)
        self._outputs = by_key(
            lambda: native.PastOutputs(sizes, options.max_tokens, options.max_matches),
            options.max_stores,
        )

    def _source(self, state: CountState) -> native.PastOutputs:
        return self._outputs(state.circle)

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`.  The output is kept, with the end of the prompt before it."""
        for request_id in request_ids:
            state = self._requests.pop(request_id)
            if state is not None and state.next_position > 0:
                start = max(state.prompt_len - native.LONGEST_MATCH, 0)
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

    REMOVED: ClassVar = {
        "max_contexts": "set max_tokens to half of it",
        "max_continuations": "set max_matches to twice of it, at most 16",
    }

    max_ngram: PositiveInt = 4
    """Longest end of the text that is looked up, in tokens."""
    max_tokens: NonNegativeInt = 100_000
    """Tokens of earlier outputs that one store keeps, as in `suffix`; half as many by default."""


# Drafts along the output that the client expects, which find their place after an edit.
#
# A client that has a file changed knows most of the answer: the file as it was.  The output follows
# it, leaves it where something is inserted, deleted or replaced, and comes back to it.


@frozen
class PredictionOptions:
    """Copies of the output that the client predicts."""

    max_places: PositiveInt = 4
    """Places in the predicted text that are continued at once, where it is unclear at which of them
    the output is."""
    min_survival: Share = 0.02
    """Less likely nodes are left out."""


@dataclass(slots=True, eq=False)
class PredictionState(CountState):
    """source: None for a request without a prediction."""

    source: native.Predicted | None = None


class PredictionDrafter(CountDrafter[PredictionState]):
    """Continues the request's own prediction; drafts nothing for requests without one."""

    def __init__(self, context: DrafterContext, options: PredictionOptions) -> None:
        super().__init__(context, options.min_survival, PredictionState.opened_by)
        self._max_places = options.max_places

    def _forget_tree(self, state: PredictionState) -> None:
        super()._forget_tree(state)
        predicted = state.params.prediction
        state.source = native.Predicted(predicted, self._max_places) if predicted else None

    def _source(self, state: PredictionState) -> native.Predicted | None:
        return state.source
