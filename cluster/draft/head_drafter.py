"""The base of drafters with a draft head on the target's hidden rows.

Their trees are grown from the target's rows behind the text, so that each ends with a commit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from cluster.core import Commit, DraftTask, Proposal, SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.committed_text import CommittedTextDrafter, common_len
from cluster.draft.head_cache import TextCache
from cluster.draft.heads.layers import HeadModule
from cluster.draft.heads.load import ReadyHead
from cluster.draft.inside import StepRows
from cluster.draft.sharpness import Sharpness
from cluster.draft.tree_request import TreeRequest, learn_draws

# Positions that a head may draft for: it has no limit of its own.
NO_LIMIT = 1 << 62

Head = TypeVar("Head", bound=HeadModule)
# What a pass takes of one text.
Input = TypeVar("Input")


@dataclass(slots=True, eq=False)
class HeadRequest(TreeRequest):
    """failed_len: the length of the text of which the head made nothing but NaN."""

    failed_len: int = -1

    @property
    def can_begin(self) -> bool:
        """True if a tree behind the text may be of use."""
        return self.can_use_drafts and self.failed_len != len(self.text)

    def fail(self) -> None:
        """End the round of this text."""
        self.drop_tree()
        self.failed_len = len(self.text)


State = TypeVar("State", bound=HeadRequest)


class HeadDrafter(CommittedTextDrafter[State], Generic[State, Head]):
    """Keeps the requests' texts, and learns from each commit how sure the head is."""

    _cache: TextCache

    def __init__(
        self, context: DrafterContext, ready: ReadyHead[Head], state: type[State], num_fits: int
    ) -> None:
        """state: of a request.  num_fits: depths, the last of them for all below it, that are
        calibrated each by itself."""
        super().__init__(context, state.opened_by)
        self._state = state
        self._head, self._vocabulary, self._dtype = ready.head, ready.vocabulary, ready.dtype
        self.made_for = ready.made_for
        self._sharpness: Bounded[list[Sharpness]] = Bounded(
            lambda: [Sharpness() for _ in range(num_fits)]
        )

    @torch.inference_mode()
    def read(self, rows: Sequence[StepRows]) -> None:
        """See `StepReader`: everything is kept in the target's pages."""
        self._cache.write(rows)

    def _request_of_nobody(self) -> State:
        """For warming up: first calls take longer than all that follow."""
        request = self._state(0, 1, "", SamplingParams(temperature=1.0, seed=0))
        request.text.append(np.zeros(2, np.int32))
        return request

    def _forget_tree(self, request: State) -> None:
        request.drop_tree()

    def _advance(self, request: State, commit: Commit) -> None:
        kept = common_len(request.text, commit)
        request.cut(kept)
        request.text.append(commit.token_ids[kept - commit.base_len :])
        self._learn(request)
        request.drop_tree()

    def _learn(self, request: State) -> None:
        """Fit to the draws that the tree foresaw."""
        tree = request.tree
        if tree is not None:
            token_ids = request.text.token_ids[request.root_len :].tolist()
            learn_draws(self._fits_of(request), tree, tree.walk(token_ids), token_ids)

    def _fits_of(self, request: State) -> list[Sharpness]:
        # Greedy and sampled requests of a task class are calibrated separately.
        return self._sharpness.of((request.task, request.params.temperature == 0.0))


class OnePassDrafter(HeadDrafter[HeadRequest, Head], Generic[Head, Input]):
    """A tree is complete after one pass over all requests."""

    @abstractmethod
    def _input(self, request: HeadRequest) -> Input | None:
        """The input of a pass behind the text; None where it is not there."""

    @abstractmethod
    def _drafted(self, asked: Sequence[tuple[HeadRequest, int, Input]]) -> Sequence[Proposal]:
        """One pass.  asked: each with how many nodes at most; those that make nothing but NaN are
        to `fail`."""

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        asked = [
            (request, max_nodes, given)
            for request, max_nodes in self._asked(tasks)
            if request.tree is None and request.can_begin
            if (given := self._input(request)) is not None
        ]
        return self._drafted(asked) if asked else []
