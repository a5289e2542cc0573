"""Useless drafters, for measuring what bad drafts cost.  Not part of the product.

A configuration names them like any external drafter, e.g.
`benchmarks.never_slower.drafters:RandomDrafter`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.core import Proposal, TokenTree
from cluster.draft.base import DrafterContext, DraftTask
from cluster.draft.committed_text import CommittedTextDrafter, RequestState
from cluster.records import frozen


@frozen
class RandomOptions:
    """vocab_size: upper bound of the random tokens.  claim: claimed survival per level."""

    vocab_size: int = 256
    claim: float = 0.9


@dataclass(slots=True, eq=False)
class _RandomState(RequestState):
    """proposed_len: length of the text that the last tree continued."""

    proposed_len: int = -1


class RandomDrafter(CommittedTextDrafter[_RandomState]):
    """Proposes a chain of random tokens with high claimed survival after every commit."""

    Options: type[Any] = RandomOptions

    def __init__(self, context: DrafterContext, options: RandomOptions) -> None:
        super().__init__(context, _RandomState.opened_by)
        self._options = options
        self._generator = np.random.default_rng(0)

    def _forget_tree(self, state: _RandomState) -> None:
        """A random chain is as good for any request."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        found = ((task, self._requests.get(task.request_id, task.generation)) for task in tasks)
        return [
            self._proposal(task, state)
            for task, state in found
            if state is not None and state.proposed_len != len(state.text)
        ]

    def _proposal(self, task: DraftTask, state: _RandomState) -> Proposal:
        state.proposed_len = len(state.text)
        count = min(task.max_nodes, self._max_nodes)
        tokens = self._generator.integers(0, self._options.vocab_size, count).tolist()
        survival = self._options.claim ** np.arange(1, count + 1)
        return Proposal(
            task.request_id,
            task.generation,
            len(state.text),
            state.text.hash_at(len(state.text)),
            TokenTree.chain(tokens),
            survival.astype(np.float32),
            self._name,
        )


@frozen
class SleepingOptions:
    """sleep_s: delay of every answer.  vocab_size: upper bound of the random tokens."""

    sleep_s: float = 0.5
    vocab_size: int = 256


class SleepingDrafter(RandomDrafter):
    """A `RandomDrafter` that also answers half a second late."""

    Options = SleepingOptions

    def __init__(self, context: DrafterContext, options: SleepingOptions) -> None:
        super().__init__(context, RandomOptions(options.vocab_size))
        self._sleep_s = options.sleep_s

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        proposals = super().propose(tasks)
        if proposals:
            time.sleep(self._sleep_s)
        return proposals
