"""Whose drafts a step has verified and accepted: residents' and the pool's, in one union."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.core import DraftTask, Proposal, SamplingParams, TokenTree
from cluster.messages import TextVerdict
from cluster.plan.roster import Roster
from cluster.requests.fields import PlainWhy
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Desk, Steps, desk_of, steps
from tests.support.worker.texts import LAWS, PROMPT, opened, plain, pool_tree
from tests.support.worker.toy_engine import ToyEngine

NAMES = ("b", "p", "a", "q")  # as an `Open` has them: neither the pool's nor the residents' order
B, P, A, Q = 1, 2, 4, 8
TEXT = plain()


class Wrong(GreedyOracle):
    """Drafts the right tokens, but for the last one."""

    def _proposal(self, task: DraftTask) -> Proposal:
        right = super()._proposal(task)
        token_ids = right.tree.token_ids.copy()
        token_ids[-1] = (token_ids[-1] + 1) % 32
        return replace(right, tree=TokenTree(token_ids, right.tree.parents))


async def begun(target: Steps, **fields: object) -> Desk:
    """A text with its first verdict, and what residents drafted after it."""
    desk = target.connect()
    desk.post(opened(drafters=NAMES, **fields))
    await target.turn()
    assert len(desk.verdicts["r"]) == 1
    return desk


def context(length: int) -> list[int]:
    return [*PROMPT, *TEXT[:length]]


async def next_verdict(target: Steps, desk: Desk) -> TextVerdict:
    await target.turn()
    return desk.verdicts["r"][-1]


async def test_each_node_counts_for_all_that_proposed_it() -> None:
    residents = [resident(GreedyOracle(4)), resident(Wrong(3, "b"), "b")]
    async with steps(residents=residents) as target:
        desk = await begun(target)
        pool = TokenTree.of([*TEXT[1:7], 31], [-1, 0, 1, 2, 3, 4, 0])
        desk.post(trees=[pool_tree(context(1), pool, [P | Q, P | Q, P, P, Q, Q, Q])])
        verdict = await next_verdict(target, desk)
        await target.run()
    assert desk.text() == TEXT
    # The path: four of "a", of which "b" had two, and all six of the pool.
    assert verdict.sources.tolist() == [A | B | P | Q, A | B | P | Q, A | P, A | P, Q, Q]
    # Beside the path are the wrong turns of "b" and of "q".
    assert verdict.num_nodes == 8
    assert verdict.verified == (3, 4, 4, 5)
    assert (verdict.why, len(verdict.token_ids)) == (PlainWhy.NONE, 7)


async def test_a_tree_of_the_pool_that_is_some_steps_old_is_followed_with_its_sources() -> None:
    async with steps(ToyEngine(runs_ahead=False)) as target:
        desk = await begun(target)
        for _ in range(2):
            await target.turn()
        pool = TokenTree.of([31, *TEXT[1:6], 30], [-1, -1, 1, 2, 3, 4, 3])
        desk.post(trees=[pool_tree(context(1), pool, [Q, P, P, P, P | Q, Q, P])])
        verdict = await next_verdict(target, desk)
    # Two of its nodes are text by now, and what stood beside them has gone with them.
    assert verdict.num_nodes == 4
    assert verdict.sources.tolist() == [P, P | Q, Q]
    assert verdict.verified == (0, 3, 0, 2)


async def test_what_a_step_has_left_of_a_tree_of_the_pool_keeps_its_sources() -> None:
    async with steps(max_draft_tokens=2) as target:
        desk = await begun(target)
        pool = TokenTree.of([31, *TEXT[1:6]], [-1, -1, 1, 2, 3, 4])
        survival = np.array([0.01, 0.9, 0.8, 0.7, 0.6, 0.5], np.float32)
        tree = pool_tree(context(1), pool, [Q, P, Q, P | Q, Q, P], survival=survival)
        desk.post(trees=[tree])
        first = await next_verdict(target, desk)
        second = await next_verdict(target, desk)
    assert (first.num_nodes, first.sources.tolist()) == (2, [P, Q])
    # The target drew the third itself.
    assert (second.num_nodes, second.sources.tolist()) == (2, [Q, P])


async def test_a_tree_of_the_pool_that_the_text_has_left_is_gone() -> None:
    async with steps() as target:
        desk = await begun(target)
        await target.turn()
        wrong = TokenTree.chain([(TEXT[1] + 1) % 32, 5, 6])
        desk.post(trees=[pool_tree(context(1), wrong)])
        verdict = await next_verdict(target, desk)
        assert verdict.num_nodes == 0
        assert verdict.why is PlainWhy.NO_DRAFTS
        assert [text.held for text in target.texts.values()] == [{}]


@pytest.mark.parametrize(
    ("weights", "owners", "credited"),
    [
        ((0.0, 9.0, 0.0, 5.0), (1, 1, 1, 1, 3, 3), (1, 4, 0, 3)),
        ((0.0, 5.0, 0.0, 9.0), (3, 3, 1, 1, 3, 3), (1, 2, 0, 5)),
        ((), (0, 0, 2, 2, 3, 3), (3, 0, 2, 3)),  # nothing is known of the pool's
    ],
)
async def test_each_node_is_credited_to_the_one_with_the_largest_weight(
    weights: tuple[float, ...], owners: tuple[int, ...], credited: tuple[int, ...]
) -> None:
    residents = [resident(GreedyOracle(4)), resident(Wrong(3, "b"), "b")]
    async with steps(residents=residents) as target:
        desk = await begun(target)
        pool = TokenTree.of([*TEXT[1:7], 31], [-1, 0, 1, 2, 3, 4, 0])
        bits = [P | Q, P | Q, P, P, Q, Q, Q]
        desk.post(trees=[pool_tree(context(1), pool, bits, weights=weights)])
        verdict = await next_verdict(target, desk)
    assert (verdict.owners, verdict.credited) == (owners, credited)
    assert sum(verdict.credited) == verdict.num_nodes


async def test_a_shadow_is_asked_and_never_verified() -> None:
    shadow, served = GreedyOracle(4), GreedyOracle(2, "b")
    residents = [resident(shadow), resident(served, "b")]
    config = Config(drafters={"a": DrafterConfig(kind="suffix", shadow=True)})
    async with steps(residents=residents, roster=Roster(config)) as target:
        desk = await begun(target)
        verdict = await next_verdict(target, desk)
        await target.run()
        scored = {row["drafter"] for row in target.controller.acceptance.table()}
    assert shadow.tasks
    assert (verdict.num_nodes, verdict.sources.tolist()) == (2, [B, B])
    assert sum(each.verified[2] for each in desk.verdicts["r"] if each.verified) == 0
    assert scored >= {"a", "b"}


class Pausing(GreedyOracle):
    """Has nothing to say at its second call."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        if len(self.tasks) == 1:
            self.tasks.extend(tasks)
            return []
        return super().propose(tasks)


async def test_a_step_with_no_drafts_at_hand_says_so_and_the_next_goes_on() -> None:
    async with steps(residents=[resident(Pausing(2))]) as target:
        desk = await begun(target)
        whys = []
        for _ in range(4):
            verdict = await next_verdict(target, desk)
            whys.append((verdict.num_nodes, verdict.why))
    assert whys == [
        (2, PlainWhy.NONE),
        (0, PlainWhy.NO_DRAFTS),
        (2, PlainWhy.NONE),
        (2, PlainWhy.NONE),
    ]


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
