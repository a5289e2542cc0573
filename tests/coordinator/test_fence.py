"""Bookkeeping that fails costs no request, no target and no drafter."""

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from cluster.coordinator import drafters
from cluster.coordinator.pool_scores import PoolScores
from cluster.coordinator.present import Series
from cluster.messages import StepReport, VerdictFrame
from cluster.metrics.recorder import Recorder
from cluster.plan.controller import Controller
from cluster.plan.fence import Fence
from cluster.plan.roster import DraftScores
from cluster.spec.statistics import TextStatistics
from tests.support.coordinator.house import GREEDY, SEEDED, at_work, house
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd
from tests.support.worker.residents import GreedyOracle, resident

# At the target, and at the coordinator.
PARTS = [
    (Controller, "plan"),
    (Controller, "learn"),
    (Controller, "first_ask"),
    (DraftScores, "score"),
    (DraftScores, "record"),
    (TextStatistics, "take"),
    (PoolScores, "ask"),
    (drafters, "gather"),
    (Series, "_enter_answers"),
]


@pytest.mark.parametrize(
    ("owner", "part"), PARTS, ids=[f"{owner.__name__}.{part}" for owner, part in PARTS]
)
async def test_a_part_that_only_learns_may_fail_in_every_round(
    monkeypatch: pytest.MonkeyPatch, owner: Any, part: str
):
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(part)

    monkeypatch.setattr(owner, part, fail)
    async with house(["a", "inside"], budget="adaptive") as stage:
        inside = resident(GreedyOracle(name="inside"), "inside")
        target = stage.add_target(ToyTarget(residents=[inside]))
        drafter = stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
        await asyncio.gather(
            *(stage.ask(params=each, id=f"r{index}") for index, each in enumerate((GREEDY, SEEDED)))
        )
        await stage.pass_time(2.0)
        assert stage.target_ids() == ["target-0"]
        assert {each["breaker"] for each in stage.status()["drafters"]} == {"closed"}
        stage.metrics()
        monkeypatch.undo()
        metrics = stage.metrics()
        assert "drafthouse_failovers_total 0.0" in metrics
        assert "drafthouse_bookkeeping_faults_total{" in metrics, "what failed is counted"
        target.sever()
        drafter.sever()
        await stage.settle()


def test_failures_are_logged_at_each_doubling(caplog: pytest.LogCaptureFixture):
    section = Fence(Recorder(), "sums")

    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            with section:
                raise KeyError("unknown")

    assert len(caplog.records) == 7


def test_what_is_no_failure_passes_the_fence():
    section = Fence(Recorder(), "sums")

    with pytest.raises(asyncio.CancelledError), section:
        raise asyncio.CancelledError


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1.0])
async def test_a_report_of_times_that_are_none_is_left_aside(time_s: float):
    def confused(frame: VerdictFrame) -> VerdictFrame:
        report = frame.report or StepReport()
        return replace(frame, report=replace(report, step_time_s=time_s))

    async with at_work(
        ToyTarget(says=confused), ToyDrafter("a", oracle_in_a_crowd(1)), budget="adaptive"
    ) as stage:
        await stage.ask()
        assert stage.status()["recent_steps"] == []
        metrics = stage.metrics()
    assert "drafthouse_bookkeeping_faults_total{" not in metrics
