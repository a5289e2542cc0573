"""Whose drafts a step has verified and accepted: residents' and the pool's, in one union."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cluster.core import DraftTask, Proposal, SamplingParams, TokenTree
from cluster.requests.fields import PlainWhy
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import desk_of
from tests.support.worker.texts import LAWS, PROMPT, opened, plain, pool_tree

NAMES = ("b", "p", "a", "q")  # as an `Open` has them: neither the pool's nor the residents' order
B, P, A, Q = 1, 2, 4, 8


class Wrong(GreedyOracle):
    """Drafts the right tokens, but for the last one."""

    def _proposal(self, task: DraftTask) -> Proposal:
        right = super()._proposal(task)
        token_ids = right.tree.token_ids.copy()
        token_ids[-1] = (token_ids[-1] + 1) % 32
        return replace(right, tree=TokenTree(token_ids, right.tree.parents))


async def test_each_node_counts_for_all_that_proposed_it_and_is_credited_to_the_weightiest() -> (
    None
):
    text, residents = plain(), [resident(GreedyOracle(4)), resident(Wrong(3, "b"), "b")]
    async with desk_of(opened(drafters=NAMES), residents=residents) as desk:
        await desk.turn()
        pool = TokenTree.of([*text[1:7], 31], [-1, 0, 1, 2, 3, 4, 0])
        bits = [P | Q, P | Q, P, P, Q, Q, Q]
        weights = (0.0, 5.0, 0.0, 9.0)
        desk.post(trees=[pool_tree([*PROMPT, *text[:1]], pool, bits, weights=weights)])
        await desk.run()
    assert desk.text() == text
    verdict = desk.verdicts["r"][1]
    # The path: four of "a", of which "b" had two, and all six of the pool.
    assert verdict.sources.tolist() == [A | B | P | Q, A | B | P | Q, A | P, A | P, Q, Q]
    # Beside the path are the wrong turns of "b" and of "q".
    assert verdict.num_nodes == 8
    assert verdict.verified == (3, 4, 4, 5)
    assert (verdict.owners, verdict.credited) == ((3, 3, 1, 1, 3, 3), (1, 2, 0, 5))
    assert (verdict.why, len(verdict.token_ids)) == (PlainWhy.NONE, 7)


@LAWS
async def test_residents_and_the_pool_together_change_no_text(params: SamplingParams) -> None:
    text = plain(params=params)
    generator = np.random.default_rng(4)
    residents = [resident(GreedyOracle(3)), resident(Wrong(2, "b"), "b")]
    async with desk_of(opened(params=params, drafters=NAMES), residents=residents) as desk:
        await desk.turn()
        while not desk.is_over():
            told = desk.text()
            base = int(generator.integers(1, len(told) + 1))
            right = text[base : base + int(generator.integers(0, 9))]
            tree = TokenTree.of([*right, 31], [*range(-1, len(right) - 1), -1])
            if 31 not in right[:1]:
                desk.post(trees=[pool_tree([*PROMPT, *text[:base]], tree, [P] * len(tree))])
            await desk.turn()
    assert desk.text() == text
    assert len(desk.verdicts["r"]) < 30
