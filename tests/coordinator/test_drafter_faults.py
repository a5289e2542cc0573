"""Faults of drafters are listed by name and reason, and said once a minute."""

from __future__ import annotations

import pytest

from cluster.errors import WorkerError
from tests.coordinator.test_drafter_pool import RefusingDrafter
from tests.support.coordinator.house import House, at_work
from tests.support.coordinator.toys import ToyDrafter, oracle_chain


async def ask(stage: House, count: int) -> None:
    for index in range(count):
        await stage.ask(id=f"r{index}-{stage.clock.now}")
        await stage.settle()


async def test_the_status_lists_faults_and_who_is_left_alone() -> None:
    async with at_work(
        ToyDrafter("a", oracle_chain()),
        RefusingDrafter("b", oracle_chain(), code=WorkerError.code),
        breaker_failures=3,
    ) as stage:
        assert stage.status()["faults"] == {}
        await ask(stage, 2)
        status = stage.status()
        assert status["faults"] == {"b": {"refused": 2}}
        assert status["left_alone"] == []
        await ask(stage, 1)
        assert stage.status()["left_alone"] == ["b"]
        metrics = stage.metrics()
    assert 'drafthouse_drafter_faults_total{drafter="b",why="refused"} 3.0' in metrics


async def test_another_model_in_a_drafters_place_does_not_inherit_its_open_breaker() -> None:
    failing = RefusingDrafter("b", oracle_chain(), code=WorkerError.code, model_hash="old")
    async with at_work(failing, breaker_failures=3) as stage:
        await ask(stage, 3)
        stage.add_drafter(ToyDrafter("b", oracle_chain(), model_hash="old"))
        assert stage.status()["left_alone"] == ["b"], "the same one, started anew"
        stage.add_drafter(ToyDrafter("b", oracle_chain(), model_hash="new"))
        assert stage.status()["left_alone"] == []


async def test_the_same_fault_is_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async with at_work(
        RefusingDrafter("b", oracle_chain(), code=WorkerError.code), breaker_failures=1000
    ) as stage:
        await ask(stage, 10)
        said = [line for line in caplog.messages if "name=b" in line]
        assert len(said) == 1
        stage.clock.now += 61.0
        await ask(stage, 1)
        said = [line for line in caplog.messages if "name=b" in line]
    assert "times=11" in said[-1]
    assert len(said) == 2
