"""Drafters inside a target in every phase of a rollout: who is asked and verified; same text."""

from __future__ import annotations

import pytest

from cluster import metrics
from cluster.config.proof import RolloutConfig
from cluster.config.schema import Config, DrafterConfig
from cluster.core import SamplingParams
from cluster.plan.roster import Roster
from cluster.spec.trials import Phase
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import Steps, desk_of, steps
from tests.support.worker.texts import LAWS, opened, plain

NAMES = ("old", "new")


def roster(phase: str, share: float) -> Roster:
    drafter = DrafterConfig(kind="suffix", rollout=RolloutConfig("old", share))
    made = Roster(Config(drafters={"new": drafter}), NAMES)
    made.restore({"new@": {"phase": phase, "places": 0, "lead": [0.0] * 20}})
    return made


class Stage:
    """Two drafters that are right, of which the candidate's chains are longer."""

    def __init__(self, phase: str, share: float) -> None:
        self.old, self.new = GreedyOracle(2, "old"), GreedyOracle(4, "new")
        self.roster = roster(phase, share)
        both = (self.old, self.new)
        self.residents = [resident(each, each.name) for each in both]

    async def verified(self, target: Steps, params: SamplingParams) -> tuple[int, int]:
        """Run a text; returns how many nodes of the former and of the candidate were verified."""
        desk = target.connect()
        desk.post(opened(params=params, drafters=NAMES))
        await target.run()
        assert desk.text() == plain(params=params)
        found = [each.verified for each in desk.verdicts["r"] if each.verified]
        return sum(each[0] for each in found), sum(each[1] for each in found)


@LAWS
@pytest.mark.parametrize("phase", [*Phase])
@pytest.mark.parametrize("in_sample", [True, False])
async def test_roles_decide_who_is_asked_and_verified_and_never_the_text(
    phase: Phase, in_sample: bool, params: SamplingParams
) -> None:
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
) -> None:
    stage = Stage("active", 1.0)
    async with desk_of(
        opened(params=params, drafters=NAMES), residents=stage.residents, roster=stage.roster
    ) as desk:
        for turn in range(12):
            stage.roster.met("new", "" if turn // 3 % 2 else "other")
            await desk.turn()
        await desk.run()
    assert desk.text() == plain(params=params)
    verified = [each.verified for each in desk.verdicts["r"] if each.verified]
    assert any(each[0] for each in verified)
    assert any(each[1] for each in verified)


async def test_faults_of_a_canary_and_the_phase_are_reported() -> None:
    stage = Stage("canary", 1.0)
    async with steps(residents=stage.residents, roster=stage.roster) as target:
        _, state = target.loop.report()
        assert [each["phase"] for each in state["rollouts"]] == ["canary"]
        stage.residents[1].breaker.faults["rubbish"] += 3
        _, state = target.loop.report()
        assert [each["phase"] for each in state["rollouts"]] == ["retired"]
        assert target.told(metrics.ROLLOUT_PHASE) == {("new",): 3}
        assert target.told(metrics.ROLLOUT_CHANGES) == {("new", "retired"): 1}
        old, new = await stage.verified(target, SamplingParams(temperature=0.0, max_tokens=40))
    assert old > 0
    assert new == 0
