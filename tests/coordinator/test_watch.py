"""What watchers of a coordinator are told, and that nothing is noted where there are none."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.watch import EVENTS, Drafts, StepEvent, Watch, encoded
from cluster.messages import ProposalFrame, StepReport
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

    def all(self, name: str) -> list[dict[str, Any]]:
        return [event for each, event in self.told if each == name]


def names(told: Told) -> set[str]:
    return {name for name, _ in told}


async def test_a_watcher_sees_every_step_and_what_drafters_brought():
    async with at_work(ToyDrafter("right", oracle_chain())) as stage:
        watcher = Watcher(stage.coordinator)
        await watcher.until(lambda told: {"drafters", "state", "scores"} <= names(told))
        events = await stage.ask()
        stats = events[-1].stats

        def num_steps(told: Told) -> int:
            rounds = [event for name, event in told if name == "rounds"]
            return sum(len(steps) for event in rounds for steps in event["steps"].values())

        await watcher.until(lambda told: num_steps(told) >= stats.num_steps)
        await watcher.events.aclose()
    name, hello = watcher.told[0]
    assert (name, hello["drafters"], hello["targets"]) == ("hello", ["right"], ["target-0"])
    steps = [
        StepEvent(*step) for event in watcher.all("rounds") for step in event["steps"]["target-0"]
    ]
    assert len(steps) == stats.num_steps
    assert sum(step.accepted for step in steps) == stats.num_accepted_draft_tokens > 0
    assert sum(step.nodes for step in steps) == stats.num_draft_tokens
    assert {step.texts for step in steps} == {1}
    assert all(step.rows >= step.texts + step.nodes for step in steps)
    drafts = [Drafts(*each) for event in watcher.all("rounds") for each in event["drafts"]]
    assert {(each.name, each.id) for each in drafts} == {("right", "r0")}
    assert sum(each.trees for each in drafts) > 0
    for each, event in watcher.told:
        assert list(event) == list(EVENTS[each].__annotations__)
        assert event["coordinator"] == hello["coordinator"]


async def test_a_plain_step_says_why():
    async with at_work() as stage:
        watcher = Watcher(stage.coordinator)
        await watcher.until(lambda told: "scores" in names(told))
        await stage.ask()
        await watcher.until(lambda told: "rounds" in names(told))
        await watcher.events.aclose()
    whys = {step[-1] for event in watcher.all("rounds") for step in event["steps"]["target-0"]}
    assert whys == {"", "no_drafts"}  # the step of the prompt could have none


async def test_nothing_is_noted_without_watchers_and_the_text_is_the_same():
    async with at_work(ToyDrafter("right", oracle_chain())) as stage:
        watches = stage.coordinator._watches
        assert not watches.open
        before = text_of(await stage.ask())
        first, second = Watcher(stage.coordinator), Watcher(stage.coordinator)
        for each in (first, second):
            await each.until(lambda told: bool(told))
        assert len(watches.open) == 2
        assert text_of(await stage.ask()) == before
        await first.events.aclose()
        assert len(watches.open) == 1
        await second.events.aclose()
        assert not watches.open


def test_an_event_is_bounded_and_keeps_the_newest_steps():
    clock = iter(range(10**6))
    watch = Watch(lambda: float(next(clock)))

    for number in range(5000):
        watch.stepped(f"target-{number % 7}", StepReport(12345.678901, num_sequences=number))
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
    watch = Watch(lambda: 0.0)
    for num_emitted in (5, 2, 99):
        report = StepReport(num_sequences=2, num_nodes=8, num_emitted_tokens=num_emitted)
        watch.stepped("t", report)
    rounds = watch.take("c")
    assert [step.accepted for step in rounds.steps["t"]] == [3, 0, 8]
