"""Pool drafters in every phase of a rollout: who is told, whose drafts are sent on, same text."""

import pytest

from cluster.config.speculation import RolloutConfig
from cluster.spec.trials import Phase
from tests.support.coordinator.house import SEEDED, House, house
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain


def staged(stage: House, phase: str) -> dict[str, ToyDrafter]:
    """Let drafter `b` be in that phase."""
    known = {"b@": {"phase": phase, "places": 0, "lead": [0.0] * 20}}
    stage.coordinator.restore_learned({"scores": [], "rollouts": known})
    stage.add_target(ToyTarget())
    drafters = {name: ToyDrafter(name, oracle_chain()) for name in ("a", "b")}
    for each in drafters.values():
        stage.add_drafter(each)
    return drafters


@pytest.mark.parametrize("phase", [*Phase])
@pytest.mark.parametrize("in_sample", [True, False])
async def test_roles_decide_who_is_told_and_verified_and_never_the_text(
    phase: Phase, in_sample: bool
):
    rollouts = {"b": RolloutConfig("a", 1.0 if in_sample else 0.001)}
    async with house(rollouts=rollouts) as stage:
        drafters = staged(stage, phase)
        events = await stage.ask(params=SEEDED)
        await stage.settle()
        (known,) = stage.status()["rollouts"]
    verified = {name for name, count in events[-1].stats.verified_by_drafter.items() if count}
    serves_new = phase is Phase.ACTIVE or (phase is Phase.CANARY and in_sample)
    assert verified == ({"b"} if serves_new else {"a"})
    is_compared = in_sample and phase is not Phase.RETIRED
    assert bool(drafters["a"].opened) == (is_compared or not serves_new)
    assert bool(drafters["b"].opened) == (is_compared or serves_new)
    assert (known["places"] != 0) == is_compared
    described = {"drafter": "b", "replaces": "a", "phase": phase.value, "is_here": True}
    assert known.items() >= described.items()
    assert known["error"] is None or known["error"] >= 0.0


async def test_the_former_serves_when_the_one_that_had_replaced_it_has_left():
    async with house(rollouts={"b": RolloutConfig("a", 0.001)}) as stage:
        staged(stage, "active")
        stage.coordinator.remove_drafter("b", "r0")
        await stage.settle()
        events = await stage.ask()
    assert set(events[-1].stats.verified_by_drafter) == {"a"}


async def test_faults_retire_a_canary_and_metrics_say_so():
    async with house(rollouts={"b": RolloutConfig("a", 1.0)}, breaker_reset_s=60.0) as stage:
        drafters = staged(stage, "canary")
        drafters["b"].survival = 7.0  # no probability
        await stage.ask()
        await stage.pass_time(1.0)
        said = stage.metrics()
    assert 'drafthouse_rollout_changes_total{drafter="b",phase="retired"} 1.0' in said
    assert 'drafthouse_rollout_phase{drafter="b"} 3.0' in said


async def test_a_text_under_a_textbooks_law_has_the_former_alone():
    async with house(rollouts={"b": RolloutConfig("a", 1.0)}, laws=("rejection",)) as stage:
        drafters = staged(stage, "active")
        await stage.ask(params=SEEDED)
        await stage.settle()
    assert drafters["a"].opened
    assert not drafters["b"].opened
