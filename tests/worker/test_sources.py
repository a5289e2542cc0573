"""Whose drafts a step has verified and accepted: residents' and the pool's, in one union."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster import metrics
from cluster.config.schema import Config, DrafterConfig
from cluster.config.speculation import RolloutConfig
from cluster.core import Proposal, SamplingParams, TokenTree
from cluster.draft.base import DraftTask
from cluster.plan.roster import Roster
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import TextVerdict
from cluster.spec.trials import Phase
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Desk, Steps, desk_of, steps
from tests.support.worker.texts import GREEDY, LAWS, PROMPT, opened, plain, pool_tree
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


async def test_a_tree_of_the_pool_that_is_some_steps_old_is_followed_with_its_sources():
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


@pytest.mark.parametrize(
    ("weights", "owners", "credited"),
    [
        ((0.0, 9.0, 0.0, 5.0), (1, 1, 1, 1, 3, 3), (1, 4, 0, 3)),
        ((0.0, 5.0, 0.0, 9.0), (3, 3, 1, 1, 3, 3), (1, 2, 0, 5)),
        ((), (0, 0, 2, 2, 3, 3), (3, 0, 2, 3)),  # nothing is known of the pool's
    ],
)
async def test_each_node_counts_for_all_that_proposed_it_and_is_credited_to_the_heaviest(
    weights: tuple[float, ...], owners: tuple[int, ...], credited: tuple[int, ...]
):
    residents = [resident(GreedyOracle(4)), resident(Wrong(3, "b"), "b")]
    async with steps(residents=residents) as target:
        desk = await begun(target)
        pool = TokenTree.of([*TEXT[1:7], 31], [-1, 0, 1, 2, 3, 4, 0])
        bits = [P | Q, P | Q, P, P, Q, Q, Q]
        desk.post(trees=[pool_tree(context(1), pool, bits, weights=weights)])
        verdict = await next_verdict(target, desk)
        await target.run()
    assert desk.text() == TEXT
    # The path: four of "a", of which "b" had two, and all six of the pool.
    assert verdict.sources.tolist() == [A | B | P | Q, A | B | P | Q, A | P, A | P, Q, Q]
    # Beside the path are the wrong turns of "b" and of "q".
    assert verdict.num_nodes == sum(credited) == 8
    assert verdict.verified == (3, 4, 4, 5)
    assert (verdict.why, len(verdict.token_ids)) == (PlainWhy.NONE, 7)
    assert (verdict.owners, verdict.credited) == (owners, credited)


async def test_a_step_with_no_drafts_at_hand_says_so_and_the_next_goes_on():
    oracle, whys = GreedyOracle(2), []
    async with steps(residents=[resident(oracle)]) as target:
        desk = await begun(target)
        for length in (0, 2, 2):
            oracle.length = length
            verdict = await next_verdict(target, desk)
            whys.append((verdict.num_nodes, verdict.why))
    assert whys == [
        (2, PlainWhy.NONE),
        (0, PlainWhy.NO_DRAFTS),
        (2, PlainWhy.NONE),
    ]


@LAWS
async def test_residents_and_the_pool_together_change_no_text(params: SamplingParams):
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


# Drafters inside a target in every phase of a rollout: who is asked and verified; same text.


PAIR = ("old", "new")


def roster(phase: str, share: float) -> Roster:
    drafter = DrafterConfig(kind="suffix", rollout=RolloutConfig("old", share))
    made = Roster(Config(drafters={"new": drafter}), PAIR)
    made.restore({"new@": {"phase": phase, "places": 0, "lead": [0.0] * 20}})
    return made


class Stage:
    """Two drafters that are right, of which the candidate's chains are longer."""

    def __init__(self, phase: str, share: float) -> None:
        self.old, self.new = GreedyOracle(2, "old"), GreedyOracle(4, "new")
        self.roster = roster(phase, share)
        self.residents = [resident(self.old, "old"), resident(self.new, "new")]

    async def verified(self, target: Steps, params: SamplingParams) -> tuple[int, int]:
        """Run a text; returns how many nodes of the former and of the candidate were verified."""
        desk = target.connect()
        desk.post(opened(params=params, drafters=PAIR))
        await target.run()
        assert desk.text() == plain(params=params)
        found = [each.verified for each in desk.verdicts["r"] if each.verified]
        return sum(each[0] for each in found), sum(each[1] for each in found)


@LAWS
@pytest.mark.parametrize("phase", [*Phase])
@pytest.mark.parametrize("in_sample", [True, False])
async def test_roles_decide_who_is_asked_and_verified_and_never_the_text(
    phase: Phase, in_sample: bool, params: SamplingParams
):
    stage = Stage(phase, 1.0 if in_sample else 0.001)
    async with steps(residents=stage.residents, roster=stage.roster) as target:
        old, new = await stage.verified(target, params)
    serves_new = phase is Phase.ACTIVE or (phase is Phase.CANARY and in_sample)
    assert (old > 0, new > 0) == (not serves_new, serves_new)
    is_compared = in_sample and phase is not Phase.RETIRED
    assert bool(stage.old.tasks) == (is_compared or not serves_new)
    assert bool(stage.new.tasks) == (is_compared or serves_new)
    (known,) = stage.roster.table()
    assert (known["places"] != 0) == is_compared


@LAWS
async def test_a_change_in_the_middle_of_a_text_drops_the_trees_and_keeps_the_text(
    params: SamplingParams,
):
    stage = Stage("active", 1.0)
    async with desk_of(
        opened(params=params, drafters=PAIR), residents=stage.residents, roster=stage.roster
    ) as desk:
        for turn in range(12):
            stage.roster.met("new", "" if turn // 3 % 2 else "other")
            await desk.turn()
        await desk.run()
    assert desk.text() == plain(params=params)
    verified = [each.verified for each in desk.verdicts["r"] if each.verified]
    assert any(each[0] for each in verified)
    assert any(each[1] for each in verified)


async def test_faults_of_a_canary_and_the_phase_are_reported():
    stage = Stage("canary", 1.0)
    async with steps(residents=stage.residents, roster=stage.roster) as target:
        _, state = target.loop.report()
        assert [each["phase"] for each in state["rollouts"]] == ["canary"]
        stage.residents[1].breaker.faults["rubbish"] += 3
        _, state = target.loop.report()
        assert [each["phase"] for each in state["rollouts"]] == ["retired"]
        assert target.told(metrics.ROLLOUT_PHASE) == {("new",): 3}
        assert target.told(metrics.ROLLOUT_CHANGES) == {("new", "retired"): 1}
        old, new = await stage.verified(target, GREEDY)
        _, state = target.loop.report()
    assert old > 0
    assert new == 0
    assert state["residents"] == dict.fromkeys(PAIR, "closed")
    assert state["scores"] == target.controller.acceptance.table() != []
    assert state["loads"] == [
        {
            "law": "greedy",
            "sequences": 1,
            "draft_nodes": 0,
            "with_models": False,
            "deficit_s": 0.0,
        }
    ]


# The steps of a text that asks for its draft trees.


BOTH = ("pool", "a")
POOLED, OWN = 1, 2


async def verdicts(params: SamplingParams = GREEDY, **fields: Any) -> list[TextVerdict]:
    """All of a text with a resident, and with a tree of the pool before its second step."""
    text = plain(params=params)
    async with desk_of(
        opened(params=params, drafters=BOTH, **fields), residents=[resident(GreedyOracle(3))]
    ) as desk:
        await desk.turn()
        wrong = (text[1] + 1) % 32
        tree = TokenTree.of([wrong, *text[1:3]], [-1, -1, 1])
        survival = np.array([0.2, 0.8, 0.4], np.float32)
        desk.post(trees=[pool_tree([*PROMPT, *text[:1]], tree, [POOLED] * 3, survival=survival)])
        await desk.run()
        assert desk.text() == text
        return desk.verdicts["r"]


@LAWS
async def test_path_and_own_token_of_every_step_are_its_tokens(params: SamplingParams):
    told = await verdicts(params, return_draft_trees=True)
    assert len(told) > 2
    for verdict in told:
        step = verdict.step
        assert step.drafters == BOTH
        assert step.num_nodes == len(step.survival) == len(step.sources) == verdict.num_nodes
        tokens = [*step.token_ids[step.path].tolist(), *step.own_token_ids.tolist()]
        assert tokens == verdict.token_ids.tolist()
        nodes = [-1, *step.path.tolist()]
        assert step.parents[step.path].tolist() == nodes[:-1][: len(step.path)]
        assert (step.num_sequences, step.step_time_s > 0.0) == (1, True)
        assert step.why == (verdict.why.name.lower() if verdict.why else "")
    assert [verdict.step is None for verdict in told if verdict.num_nodes == 0][:1] == [False]


async def test_a_step_shows_whose_each_node_was_and_what_was_expected_of_it():
    second = (await verdicts(return_draft_trees=True))[1].step
    of_pool = {(TEXT[1] + 1) % 32: POOLED, TEXT[1]: POOLED | OWN, TEXT[2]: POOLED | OWN}
    bits = dict(zip(second.token_ids.tolist(), second.sources.tolist(), strict=True))
    assert bits | of_pool == bits
    assert bits[TEXT[3]] == OWN
    assert all(
        own <= second.survival[parent] if parent >= 0 else own <= 1.0
        for own, parent in zip(second.survival.tolist(), second.parents.tolist(), strict=True)
    )


async def test_a_text_that_does_not_ask_is_told_the_same_without_steps():
    told, asked = await verdicts(), await verdicts(return_draft_trees=True)
    assert all(verdict.step is None for verdict in told)
    for verdict, other in zip(told, asked, strict=True):
        assert repr(verdict) == repr(replace(other, step=None))


async def test_a_stop_token_ends_the_path_where_it_ends_the_text():
    stops = [token for place, token in enumerate(TEXT) if place > 3 and token not in TEXT[:place]]
    for stop in stops[:4]:
        told = await verdicts(replace(GREEDY, stop_token_ids=(stop,)), return_draft_trees=True)
        last = told[-1].step
        tokens = [*last.token_ids[last.path].tolist(), *last.own_token_ids.tolist()]
        assert tokens == told[-1].token_ids.tolist()
        assert stop not in tokens
