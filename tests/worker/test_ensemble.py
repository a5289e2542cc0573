"""Several models inside one target: the text is that of plain decoding, whoever is asked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.core import DraftTask, Proposal, SamplingParams, TokenTree, token_array
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import written
from tests.support.worker.texts import LAWS, opened, plain

LENGTH = 300


class Half(GreedyOracle):
    """Right in one half of a text, and sure of itself in both."""

    def __init__(self, name: str, *, is_first: bool) -> None:
        super().__init__(name=name)
        self._is_first = is_first

    def _proposal(self, task: DraftTask) -> Proposal:
        found = super()._proposal(task)
        if (found.base_len < LENGTH // 2) == self._is_first:
            return found
        tree = TokenTree.chain(token_array((found.tree.token_ids + 1) % 32))
        return replace(found, tree=tree, survival=np.full(len(tree), 0.9, np.float32))


@LAWS
async def test_a_text_does_not_depend_on_which_models_are_asked(params: SamplingParams) -> None:
    params = replace(params, max_tokens=LENGTH)
    halves = [Half("a", is_first=True), Half("b", is_first=False)]
    desk = await written(
        opened(params=params, drafters=("a", "b")),
        residents=[resident(each, each.name) for each in halves],
        budget="adaptive",
    )
    assert desk.text() == plain(params=params)
    assert all(each.tasks for each in halves)
