"""Drafters inside a target, as the coordinator sees them: named and credited, and left to it."""

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.config.schema import Config, DrafterConfig
from cluster.core import Commit, Observation
from cluster.requests.idle import IdleReason
from tests.support.coordinator.house import GREEDY, at_work, house
from tests.support.coordinator.toy_law import toy_law
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain
from tests.support.worker.residents import GreedyOracle, resident


class Insider(GreedyOracle):
    """Knows what the toy target says."""

    def __init__(self) -> None:
        super().__init__()
        self._law = toy_law


def host() -> ToyTarget:
    """A toy target with the resident `a`."""
    return ToyTarget(residents=[resident(Insider())])


@pytest.mark.usefixtures("budget")
async def test_a_resident_saves_steps_and_is_credited():
    target = host()
    async with house(["a"]) as stage:
        stage.add_target(target, "t")
        events = await stage.ask(task="code")
        await stage.pass_time(1.0)
        metrics = stage.metrics()
    (opened,) = target.opens
    assert (opened.task, opened.drafters) == ("code", ("a",))
    assert not any(frame.trees for frame in target.frames)
    stats = events[-1].stats
    assert stats.accepted_by_drafter == {"a": stats.num_accepted_draft_tokens}
    assert stats.num_accepted_draft_tokens > 0
    assert len(target.steps) < GREEDY.max_tokens
    assert 'drafthouse_drafter_up{drafter="a"} 1.0' in metrics
    assert 'drafthouse_draft_demand_nodes_total{drafter="a",process="t",task="code"}' in metrics
    assert 'drafthouse_drafter_requests{drafter="a",process="t",worker="t"} 0.0' in metrics


async def test_a_resident_and_the_pool_draft_for_one_text():
    target, outside = host(), ToyDrafter("b", oracle_chain(6))
    async with at_work(target, outside, drafters=["a", "b"]) as stage:
        events = await stage.ask()
    stats = events[-1].stats
    assert min(stats.accepted_by_drafter["a"], stats.accepted_by_drafter["b"]) > 0


class Raising(Insider):
    """Is at fault whatever it is told."""

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        raise ValueError


async def test_an_answer_says_that_its_residents_are_left_alone():
    target = ToyTarget(residents=[resident(Raising(), "a", failures=1, reset_s=600.0)])
    async with at_work(target, drafters=["a"]) as stage:
        await stage.ask()
        await stage.pass_time(1.0)
        assert stage.status()["left_alone"] == ["a"]
        assert stage.status()["faults"] == {"a": {"refused": 1}}
        events = await stage.ask(id="next")
    assert events[-1].stats.idle_because == IdleReason.DRAFTERS_DOWN


async def test_a_replica_in_the_pool_is_not_asked_for_what_the_target_has_inside():
    twin = ToyDrafter("a", oracle_chain())
    async with at_work(host(), twin) as stage:
        await stage.ask()
    assert twin.frames == []


async def test_the_residents_of_a_target_that_is_gone_are_gone_as_well():
    async with house(["a"]) as stage:
        stage.add_target(host(), "t")
        inside = {"name": "a", "id": "t", "sessions": 0, "breaker": "closed", "written_at": 0.0}
        assert stage.status()["drafters"] == [inside], "as long as it has said nothing"
        await stage.ask()
        await stage.pass_time(1.0)
        assert stage.status()["drafters"] == [inside]
        stage.coordinator.remove_target("t")
        assert stage.status()["drafters"] == []
        metrics = stage.metrics()
        assert 'drafthouse_drafter_up{drafter="a"} 0.0' in metrics
        assert 'worker="t"' not in metrics
        stage.add_target(ToyTarget(), "other")
        events = await stage.ask()
        assert events[-1].stats.idle_because == "drafters_down"
        stage.add_target(ToyTarget(), "other", refused={"a": "why"})
        assert stage.status()["refused"] == {"a": "why"}
        stage.add_target(host(), "t")
        assert stage.status()["refused"] == {}


@pytest.mark.parametrize(("kind", "count"), [("mine:Own", 1), ("prompt_lookup", 0)])
async def test_a_drafter_of_the_pool_on_the_targets_cores_is_warned_of_once(
    kind: str, count: int, caplog: pytest.LogCaptureFixture
):
    async with at_work(
        ToyTarget(devices=("host/cpu0",)), drafters=("shared", "apart"), kind=kind
    ) as stage:
        for replica in ("r0", "r1"):
            stage.add_drafter(ToyDrafter("shared", oracle_chain(), devices=("host/cpu0",)), replica)
        stage.add_drafter(ToyDrafter("apart", oracle_chain(), devices=("host/cpu1",)))
        stage.add_target(ToyTarget(devices=("host/cpu0",)), "target-1")
    warned = [line for line in caplog.messages if "shares" in line]
    assert len(warned) == count == sum("name=shared" in line for line in warned)


@pytest.mark.parametrize(
    ("kind", "options", "computes"),
    [
        ("mine:Own", {}, True),
        ("cascade", {"stages": ["small", "lookup"]}, True),
        ("cascade", {"stages": ["lookup", "lookup"]}, False),
    ],
)
def test_a_drafter_that_computes_nothing_shares_no_device(
    kind: str, options: dict[str, Any], computes: bool
):
    parts = {
        "x": DrafterConfig(kind=kind, options=options),
        "small": DrafterConfig(kind="lm", options={"engine": {"model": "m"}}),
        "lookup": DrafterConfig(kind="suffix"),
    }
    assert Config(drafters=parts).computes("x") == computes
