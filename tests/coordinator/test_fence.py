"""Bookkeeping that fails costs no request, no target and no drafter."""

import asyncio
import logging
import re
from typing import Any

import pytest

from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence
from tests.support.coordinator.house import GREEDY, SEEDED, house
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd
from tests.support.worker.residents import GreedyOracle, resident


@pytest.mark.parametrize(
    ("part", "sections"),
    [  # at the target, and at the coordinator
        ("cluster.plan.controller.Controller.plan", {"planning"}),
        ("cluster.plan.controller.Controller.learn", {"rounds"}),
        ("cluster.plan.controller.Controller.first_ask", {"planning"}),
        ("cluster.plan.roster.DraftScores.score", {"scores"}),
        ("cluster.plan.roster.DraftScores.record", {"metrics", "scores"}),
        ("cluster.spec.statistics.TextStatistics.take", {"statistics"}),
        ("cluster.coordinator.replica.Subscription.nodes_to_ask", {"commits"}),
        ("cluster.coordinator.drafters.gather", {"pool trees"}),
        ("cluster.coordinator.moment.Series._enter_answers", {"metrics"}),
        ("cluster.coordinator.moment.Series._enter_asked", {"metrics"}),
        ("cluster.coordinator.moment.Series._enter_ends", {"metrics"}),
        ("cluster.coordinator.moment.Series._enter_steps", {"metrics"}),
        ("cluster.coordinator.audit.Auditor.hear", {"statistics"}),
        ("cluster.coordinator.switchback.Switchback.hear", {"statistics"}),
        ("cluster.coordinator.watch.Watches.hear", {"metrics"}),
    ],
)
async def test_a_part_that_only_learns_may_fail_in_every_round(
    monkeypatch: pytest.MonkeyPatch, part: str, sections: set[str]
):
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(part)

    monkeypatch.setattr(part, fail)
    async with house(["a", "inside"], budget="adaptive", may_fault=True) as stage:
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
        counted = re.findall(r'bookkeeping_faults_total{part="(.+?)"', metrics)
        assert set(counted) == sections, "what failed is counted"
        target.sever()
        drafter.sever()
        await stage.settle()


def test_failures_are_counted_and_logged_at_each_doubling(caplog: pytest.LogCaptureFixture):
    section = Fence(recorder := Recorder(), "sums")

    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            with section:
                raise KeyError("unknown")

    assert [record.args for record in caplog.records] == [("sums", 2**n) for n in range(7)]
    assert all(record.exc_info for record in caplog.records)
    assert b'bookkeeping_faults_total{part="sums"} 100.0' in recorder.render()


def test_what_is_no_failure_passes_the_fence():
    section = Fence(Recorder(), "sums")

    with pytest.raises(asyncio.CancelledError), section:
        raise asyncio.CancelledError
