"""What watchers of a coordinator are told, and that nothing is noted where there are none."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.present import Stepped
from cluster.coordinator.watch import EVENTS, Drafts, Rounds, StepEvent, Watch, encoded
from cluster.core import Commit, TokenTree
from cluster.requests.fields import PlainWhy
from cluster.rpc.messages import ProposalFrame, StepReport
from tests.support.clock import FakeClock
from tests.support.coordinator.house import at_work, text_of
from tests.support.coordinator.toys import ToyDrafter, oracle_chain

Told = list[tuple[str, dict[str, Any]]]
PATIENCE_S = 60.0


class Watcher:
    """Reads a coordinator's events."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.told = []
        self.events: AsyncGenerator[tuple[str, str], None] = coordinator.watch()

    async def until(self, is_so: Callable[[Told], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so(self.told):
                name, told = await anext(self.events)
                self.told.append((name, json.loads(told)))


def steps_of(told: Told) -> list[StepEvent]:
    rounds = [event["steps"] for name, event in told if name == "rounds"]
    return [StepEvent(*step) for steps in rounds for step in steps.get("target-0", ())]


def names(told: Told) -> set[str]:
    return {name for name, _ in told}


async def test_a_watcher_sees_every_step_and_what_drafters_brought():
    """Its drafter has no draft for every other text."""

    def grow(context: list[int], opened: Commit) -> TokenTree:
        return oracle_chain(len(context) % 2)(context, opened)

    async with at_work(ToyDrafter("right", grow)) as stage:
        watcher = Watcher(stage.coordinator)
        await watcher.until(lambda told: {"drafters", "state", "scores"} <= names(told))
        events = await stage.ask()
        stats = events[-1].stats
        await watcher.until(lambda told: len(steps_of(told)) >= stats.num_steps)
        await watcher.events.aclose()
    steps = steps_of(watcher.told)
    assert len(steps) == stats.num_steps
    assert sum(step.accepted for step in steps) == stats.num_accepted_draft_tokens > 0
    assert sum(step.nodes for step in steps) == stats.num_draft_tokens
    assert {step.texts for step in steps} == {1}
    assert {step.why for step in steps} == {"", "no_drafts"}
    assert all(step.rows >= step.texts + step.nodes for step in steps)
    for each, event in watcher.told:
        assert list(event) == list(EVENTS[each].__annotations__)


async def test_nothing_is_noted_without_watchers_and_the_text_is_the_same():
    async with at_work(ToyDrafter("right", oracle_chain())) as stage:
        watches = stage.coordinator._watches
        assert not watches
        before = text_of(await stage.ask())
        first, second = Watcher(stage.coordinator), Watcher(stage.coordinator)
        for each in (first, second):
            await each.until(lambda told: bool(told))
        assert len(watches) == 2
        assert text_of(await stage.ask()) == before
        await first.events.aclose()
        assert len(watches) == 1
        await second.events.aclose()
        assert not watches


def test_an_event_is_bounded_and_keeps_the_newest_steps():
    clock = iter(range(10**6))
    watch = Watch(lambda: float(next(clock)))

    for number in range(5000):
        report = StepReport(12345.678901, num_sequences=number)
        watch.stepped(Stepped(f"target-{number % 7}", report))
        replica = SimpleNamespace(name="a-drafter-with-a-long-name", id=f"replica-{number}")
        watch.drafted(replica, ProposalFrame(draft_time_s=math.nan))  # type: ignore[arg-type]
    rounds = watch.take("c")
    _, told = encoded(rounds)
    assert len(told) < 32_768
    assert "NaN" not in told
    event = json.loads(told)
    steps = [StepEvent(*step) for steps in event["steps"].values() for step in steps]
    assert event["skipped"] == 5000 - len(steps) == 5000 - 256
    assert max(step.texts for step in steps) == 4999
    assert len(event["drafts"]) == 64
    assert watch.take("c") is None


def test_a_step_has_accepted_what_it_brought_beyond_a_token_a_text():
    clock = FakeClock()
    watch = Watch(clock)
    step = StepReport(0.0025, draft_time_s=0.001, num_sequences=2, num_nodes=8, num_rows=11)
    replica = SimpleNamespace(name="a", id="r0")
    for num_emitted in (5, 2, 99):
        report = replace(step, num_emitted_tokens=num_emitted, why=PlainWhy.GUARD)
        watch.stepped(Stepped("t", report))
        proposals = (SimpleNamespace(tree="two"), SimpleNamespace(tree="trees"))
        watch.drafted(replica, ProposalFrame(proposals, draft_time_s=0.25))  # type: ignore[arg-type]
    clock.now += 0.5004
    rounds = watch.take("c")
    steps = [StepEvent(500.4, 2.5, 1.0, 2, 11, 8, accepted, "guard") for accepted in (3, 0, 8)]
    drafts = [Drafts("a", "r0", 6, 24, 750.0)]
    assert rounds.at_ms == pytest.approx(1000.0 * time.time(), abs=1e6)
    assert rounds == Rounds("c", rounds.at_ms, {"t": steps}, drafts, 0)


async def test_the_state_is_told_at_its_ticks_and_scores_at_theirs(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("ROUNDS_EVERY_S", 0), ("TICKS_OF_STATE", 1), ("TICKS_OF_SCORES", 2)):
        monkeypatch.setattr(f"cluster.coordinator.watch._{name}", value)
    async with at_work(ToyDrafter("a", oracle_chain())) as stage:
        await stage.ask()
        await stage.pass_time(1.0)
        watcher = Watcher(stage.coordinator)
        await watcher.until(lambda told: [name for name, _ in told].count("scores") == 2)
        status = stage.status()
        await watcher.events.aclose()
    (target,) = status["targets"]
    ticks = ["drafters", "state", "scores", "drafters", "state"]
    said = {
        "hello": {"model": "", "drafters": ["a"], "targets": ["target-0"]},
        "drafters": {each: status[each] for each in ("drafters", "left_alone", "refused")},
        "state": {
            "running": 0,
            "waiting": 0,
            "targets": [{each: target[each] for each in ("id", "sessions", "load")}],
        },
        "scores": {"pool": status["scores"], "targets": {"target-0": target["scores"]}},
    }
    assert watcher.told == [
        (name, {"coordinator": status["id"], **said[name]})
        for name in ["hello", *ticks, *ticks[:3]]
    ]
