"""The steps of a text that asks for its draft trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cluster.core import SamplingParams, TokenTree
from cluster.messages import TextVerdict
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import desk_of
from tests.support.worker.texts import GREEDY, LAWS, PROMPT, opened, plain, pool_tree

NAMES = ("pool", "a")
P, A = 1, 2


async def verdicts(params: SamplingParams = GREEDY, **fields: Any) -> list[TextVerdict]:
    """All of a text with a resident, and with a tree of the pool before its second step."""
    text = plain(params=params)
    async with desk_of(
        opened(params=params, drafters=NAMES, **fields), residents=[resident(GreedyOracle(3))]
    ) as desk:
        await desk.turn()
        wrong = (text[1] + 1) % 32
        tree = TokenTree.of([wrong, *text[1:3]], [-1, -1, 1])
        survival = np.array([0.2, 0.8, 0.4], np.float32)
        desk.post(trees=[pool_tree([*PROMPT, *text[:1]], tree, [P] * 3, survival=survival)])
        await desk.run()
        assert desk.text() == text
        return desk.verdicts["r"]


@LAWS
async def test_path_and_own_token_of_every_step_are_its_tokens(params: SamplingParams) -> None:
    told = await verdicts(params, return_draft_trees=True)
    assert len(told) > 2
    for verdict in told:
        step = verdict.step
        assert step is not None
        assert step.drafters == NAMES
        assert step.num_nodes == len(step.survival) == len(step.sources) == verdict.num_nodes
        tokens = [*step.token_ids[step.path].tolist(), *step.own_token_ids.tolist()]
        assert tokens == verdict.token_ids.tolist()
        nodes = [-1, *step.path.tolist()]
        assert step.parents[step.path].tolist() == nodes[:-1][: len(step.path)]
        assert (step.num_sequences, step.step_time_s > 0.0) == (1, True)
        assert step.why == (verdict.why.name.lower() if verdict.why else "")
    assert [verdict.step is None for verdict in told if verdict.num_nodes == 0][:1] == [False]


async def test_a_step_shows_whose_each_node_was_and_what_was_expected_of_it() -> None:
    second = (await verdicts(return_draft_trees=True))[1].step
    assert second is not None
    text = plain()
    of_pool = {(text[1] + 1) % 32: P, text[1]: P | A, text[2]: P | A}
    bits = dict(zip(second.token_ids.tolist(), second.sources.tolist(), strict=True))
    assert bits | of_pool == bits
    assert bits[text[3]] == A
    assert all(
        own <= second.survival[parent] if parent >= 0 else own <= 1.0
        for own, parent in zip(second.survival.tolist(), second.parents.tolist(), strict=True)
    )


async def test_a_text_that_does_not_ask_is_told_the_same_without_steps() -> None:
    told, asked = await verdicts(), await verdicts(return_draft_trees=True)
    assert all(verdict.step is None for verdict in told)
    for verdict, other in zip(told, asked, strict=True):
        assert repr(verdict) == repr(replace(other, step=None))


async def test_a_stop_token_ends_the_path_where_it_ends_the_text() -> None:
    text = plain()
    stops = [token for place, token in enumerate(text) if place > 3 and token not in text[:place]]
    for stop in stops[:4]:
        told = await verdicts(replace(GREEDY, stop_token_ids=(stop,)), return_draft_trees=True)
        last = told[-1].step
        assert last is not None
        tokens = [*last.token_ids[last.path].tolist(), *last.own_token_ids.tolist()]
        assert tokens == told[-1].token_ids.tolist()
        assert stop not in tokens
