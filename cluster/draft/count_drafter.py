"""The common part of count-based drafters: observe, propose, release.

A subclass says what it looks up.  No tokenizer and no torch: such a drafter serves any vocabulary
and answers within one call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.core import Commit, FloatArray, Observation, TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import DraftedRequest, WholeTreeDrafter, by_key
from cluster.draft.native import lookups as native


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
