"""The common part of count-based drafters: observe, propose, release.

A subclass defines how it learns from text and which tokens followed a context.  No tokenizer and no
torch: such a drafter serves any vocabulary and answers within one call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.core import Commit, DraftTask, Proposal, TokenArray
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.committed_text import CommittedTextDrafter, RequestState, common_len
from cluster.draft.count_tree import (
    NO_COUNT_TREE,
    Continuations,
    CountTree,
    GrowthLimits,
    grow_count_tree,
)
from cluster.draft.hit_rates import HitRates

Context = TypeVar("Context")


@dataclass(slots=True, eq=False)
class CountState(RequestState):
    """One request: its newest tree, and the max_nodes it was grown with (-1 = none)."""

    grown: CountTree = NO_COUNT_TREE
    grown_max_nodes: int = -1


State = TypeVar("State", bound=CountState)


class CountDrafter(CommittedTextDrafter[State], Generic[State, Context]):
    """Proposes one complete tree per commit."""

    is_look_up = True  # see `Drafter`

    def __init__(
        self, context: DrafterContext, min_survival: float, open_request: Callable[[Commit], State]
    ) -> None:
        super().__init__(context, open_request)
        self._min_survival = min_survival
        # Greedy and sampled requests of a task class have separate hit rates.
        self._rates: Bounded[HitRates] = Bounded(HitRates)

    @abstractmethod
    def _learn(self, state: State, start: int) -> None:
        """Learn the tokens of state.text from `start` on."""

    @abstractmethod
    def _unlearn(self, state: State, length: int) -> None:
        """Undo the tokens after `length`; called before the text is cut to `length` tokens."""

    @abstractmethod
    def _root(self, state: State) -> Context:
        """The context at the end of the committed text."""

    @abstractmethod
    def _continuations(self, state: State, context: Context) -> Continuations[Context] | None:
        """The tokens that followed `context` so far; None if there are none."""

    def _forget_tree(self, state: State) -> None:
        state.grown, state.grown_max_nodes = NO_COUNT_TREE, -1

    def _advance(self, state: State, commit: Commit) -> None:
        """Amortised cost: O(committed tokens)."""
        kept = common_len(state.text, commit)
        if kept < len(state.text):
            self._unlearn(state, kept)
            state.text.truncate(kept)
        else:
            self._score(state, commit.token_ids[kept - commit.base_len :])
        self._forget_tree(state)
        state.text.append(commit.token_ids[kept - commit.base_len :])
        self._learn(state, kept)

    def _score(self, state: State, token_ids: TokenArray) -> None:
        lessons = state.grown.lessons(token_ids.tolist())
        if lessons:
            rates = self._rates.of((state.task, state.params.temperature == 0.0))
            for evidence, hit in lessons:
                rates.record(evidence, hit=hit)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  A tree is grown completely at once and proposed once."""
        proposals = (self._propose(task) for task in tasks)
        return [proposal for proposal in proposals if proposal is not None]

    def _propose(self, task: DraftTask) -> Proposal | None:
        state = self._requests.get(task.request_id, task.generation)
        max_nodes = min(task.max_nodes, self._max_nodes)
        if state is None or state.grown_max_nodes >= max_nodes or state.next_position < 0:
            return None
        state.grown = grow_count_tree(
            self._root(state),
            lambda context: self._continuations(state, context),
            state.params,
            state.next_position,
            self._rates.of((state.task, state.params.temperature == 0.0)),
            GrowthLimits(max_nodes, self._min_survival),
        )
        state.grown_max_nodes = max_nodes
        if len(state.grown.tree) == 0:
            return None
        return Proposal(
            task.request_id,
            state.generation,
            len(state.text),
            state.text.hash_at(len(state.text)),
            state.grown.tree,
            state.grown.survival,
            self._name,
            is_complete=True,
        )
