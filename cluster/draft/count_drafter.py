"""The common part of count-based drafters: observe, propose, release.

A subclass says what it looks up.  No tokenizer and no torch: such a drafter serves any vocabulary
and answers within one call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.core import Commit, DraftTask, FloatArray, Observation, Proposal, TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.committed_text import CommittedTextDrafter, RequestState
from cluster.draft.hit_rates import HitRates
from cluster.draft.lookups import REFERENCE, Change, Ways, Wish


@dataclass(slots=True, eq=False)
class CountState(RequestState):
    """One request.

    counted: its text as `Ways` follow it.  grown_max_nodes: that the newest tree was grown with,
    -1 = there is none.  rates: those of that tree.
    """

    counted: Any = None
    grown_max_nodes: int = -1
    rates: HitRates = field(default_factory=HitRates)


State = TypeVar("State", bound=CountState)


class CountDrafter(CommittedTextDrafter[State]):
    """Proposes one complete tree per commit."""

    is_look_up = True  # see `Drafter`

    def __init__(
        self,
        context: DrafterContext,
        min_survival: float,
        open_request: Callable[[Commit], State],
        ways: Ways = REFERENCE,
        sizes: Sequence[int] = (),
    ) -> None:
        """sizes: of the n-grams that are indexed in each text, the longest first."""

        def opened(commit: Commit) -> State:
            state = open_request(commit)
            state.counted = ways.open_text(sizes)
            state.renewed = True
            return state

        super().__init__(context, opened)
        self._min_survival = min_survival
        self._ways = ways
        # Greedy and sampled requests of a task class have separate hit rates.
        self._rates: Bounded[HitRates] = Bounded(HitRates)
        self._changes: list[Change] = []

    @abstractmethod
    def _source(self, state: State) -> Any:
        """The `Source` of this request, of the kind that the drafter's `Ways` read; None = none."""

    def _room(self, state: State, max_nodes: int) -> int:
        """How many of the nodes grow from the source."""
        return max_nodes

    def _completed(
        self, state: State, tree: TokenTree, survival: FloatArray
    ) -> tuple[TokenTree, FloatArray]:
        """The tree with what else the drafter has."""
        return tree, survival

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        """See `Drafter.observe`."""
        observations = super().observe(commits)
        if self._changes:
            changes, self._changes = self._changes, []
            self._ways.advance(changes)
        return observations

    def _forget_tree(self, state: State) -> None:
        state.grown_max_nodes = -1
        state.counted.set_law(state.params)

    def _advance(self, state: State, kept_len: int, token_ids: TokenArray) -> None:
        """Amortised cost: O(committed tokens)."""
        is_lesson = kept_len == len(state.text) and state.grown_max_nodes >= 0
        state.text.truncate(kept_len)
        state.text.append(token_ids)
        state.grown_max_nodes = -1
        change = Change(state.counted, state.rates, is_lesson, kept_len, token_ids)
        self._changes.append(change)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`.  A tree is grown completely at once and proposed once."""
        states: list[State] = []
        wishes: list[Wish] = []
        for task in tasks:
            state = self._requests.get(task.request_id, task.generation)
            max_nodes = min(task.max_nodes, self._max_nodes)
            if state is None or state.grown_max_nodes >= max_nodes or state.next_position < 0:
                continue
            state.grown_max_nodes = max_nodes
            source = self._source(state)
            if source is None:
                continue
            state.rates = self._rates.of((state.task, state.params.temperature == 0.0))
            states.append(state)
            wishes.append(
                Wish(
                    state.counted, source, state.rates, state.next_position,
                    self._room(state, max_nodes),
                )
            )  # fmt: skip
        if not wishes:
            return []
        trees = self._ways.grow(wishes, self._min_survival)
        proposals = [
            self._complete(state, *self._completed(state, *grown))
            for state, grown in zip(states, trees, strict=True)
        ]
        return [proposal for proposal in proposals if len(proposal.tree.token_ids)]
