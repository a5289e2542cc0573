"""A step waits for drafts that are about to arrive: where it pays, boundedly, and for nobody else.

Time is virtual: a target of 10 ms a step, and a drafter whose trees never outlive a verdict, so
that every step finds nothing at hand unless it waits for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.core import Completion, FinishReason, Proposal, SpeculationOptions
from cluster.messages import CommitFrame, ProposalFrame
from tests.support.coordinator.house import GREEDY, House, collect, house, request, text_of
from tests.support.coordinator.toys import oracle_chain, plain_text
from tests.support.coordinator.virtual_time import TimedDrafter, TimedTarget, VirtualTime

LONG = replace(GREEDY, max_tokens=400)


@dataclass
class Stage:
    house: House
    time: VirtualTime
    target: TimedTarget
    drafter: TimedDrafter

    async def run(self, id: str = "r") -> float:
        """One request to its end; the virtual seconds it took."""
        began_at = self.time.now
        running = asyncio.create_task(collect(self.house.coordinator, request(id=id, params=LONG)))
        await self.time.run_until(running.done)
        assert text_of(await running) == plain_text([1, 2, 3], LONG)
        return self.time.now - began_at

    async def waited(self) -> list[float]:
        """How long each wait of one request lasted, in virtual seconds."""
        running = asyncio.create_task(collect(self.house.coordinator, request(params=LONG)))
        lasted: list[float] = []
        while not running.done():
            await self.time.run_until(lambda: self.is_waiting() or running.done())
            began_at = self.time.now
            await self.time.run_until(lambda: not self.is_waiting())
            lasted.append(self.time.now - began_at)
        assert text_of(await running) == plain_text([1, 2, 3], LONG)
        return lasted

    def waits(self, outcome: str) -> float:
        rendered = self.house.coordinator.render_metrics().decode()
        name = f'drafthouse_draft_waits_total{{outcome="{outcome}"}}'
        found = re.search(rf"^{re.escape(name)} (\S+)$", rendered, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def pre_drafted(self, outcome: str) -> float:
        rendered = self.house.coordinator.render_metrics().decode()
        pattern = rf'^drafthouse_pre_drafted_steps_total\{{.*outcome="{outcome}".*\}} (\S+)$'
        return sum(map(float, re.findall(pattern, rendered, re.MULTILINE)))

    def is_waiting(self) -> bool:
        statuses = self.house.coordinator.status()["targets"]
        return any(status["ready"] and not status["decoding"] for status in statuses)


@asynccontextmanager
async def stage(
    delay_s: float = 0.0009, answers: Callable[[], bool] = lambda: True, **settings: Any
) -> AsyncIterator[Stage]:
    time = VirtualTime()
    settings = {"budget": "adaptive", "max_draft_wait_ms": 4.0} | settings
    async with house(drafters=("a",), clock=time, timer=time.timer, **settings) as built:
        target = TimedTarget(time=time)
        drafter = TimedDrafter(
            "a", oracle_chain(4), survival=0.9, time=time, delay_s=delay_s, answers=answers
        )
        built.add_target(target)
        built.add_drafter(drafter)
        yield Stage(built, time, target, drafter)


async def test_a_drafter_that_answers_within_a_millisecond_is_worth_waiting_for() -> None:
    async with stage(max_draft_wait_ms=0.0) as without:
        eager_s = await without.run()
        assert without.waits("arrived") == 0
    async with stage() as waiting:
        waited_s = await waiting.run()
        assert waiting.waits("arrived") > 20
        assert waiting.waits("late") <= 2
    assert waited_s < 0.75 * eager_s


async def test_a_drafter_that_is_slower_than_the_bound_is_never_waited_for() -> None:
    async with stage(delay_s=0.006) as late:
        await late.run()
        assert late.waits("arrived") == 0
        assert late.waits("late") == 0


async def test_a_drafter_that_stalls_costs_a_few_waits_and_then_nothing() -> None:
    stalls = False
    async with stage(answers=lambda: not stalls) as stalling:
        await stalling.run("before")
        kept, late = stalling.waits("arrived"), stalling.waits("late")
        stalls = True
        stalled_s = await stalling.run("after")
        assert stalling.waits("arrived") == kept
        assert 1 <= stalling.waits("late") - late <= 8
    plain_s = (LONG.max_tokens + 1) * 0.010
    assert stalled_s <= plain_s + 8 * 0.004


async def test_a_stalled_drafter_that_comes_back_is_waited_for_again() -> None:
    stalls = False
    async with stage(answers=lambda: not stalls) as stalling:
        await stalling.run("before")
        stalls = True
        await stalling.run("stalled")
        kept, stalls = stalling.waits("arrived"), False
        await stalling.run("after")
        assert stalling.waits("arrived") > kept + 20


async def test_a_request_that_is_cancelled_during_a_wait_is_freed_at_once() -> None:
    async with stage() as waiting:
        running = asyncio.create_task(
            collect(waiting.house.coordinator, request(id="gone", params=LONG))
        )
        await waiting.time.run_until(waiting.is_waiting)
        waiting.house.coordinator.cancel("gone")
        await waiting.time.run_until(running.done)
        assert (await running)[-1].finish_reason is FinishReason.CANCELLED
        await waiting.house.settle()
        assert waiting.target.contexts == {}
        assert waiting.waits("moot") == 1
        await waiting.run("next")


async def test_the_others_go_on_when_the_one_they_wait_for_is_cancelled() -> None:
    async with stage(max_draft_wait_ms=4.0) as waiting:
        coordinator = waiting.house.coordinator
        alone = request(id="alone", params=LONG, speculation=SpeculationOptions(enabled=False))
        tasks = [
            asyncio.create_task(collect(coordinator, request(id="gone", params=LONG))),
            asyncio.create_task(collect(coordinator, alone)),
        ]
        await waiting.time.run_until(waiting.is_waiting)
        coordinator.cancel("gone")
        assert not waiting.is_waiting()
        await waiting.time.run_until(tasks[1].done)
        assert text_of(await tasks[1]) == plain_text([1, 2, 3], LONG)


async def test_a_target_that_is_lost_during_a_wait_loses_nothing() -> None:
    async with stage() as waiting:
        link = waiting.house.add_target(TimedTarget(time=waiting.time), "second")
        waiting.house.coordinator.remove_target("target-0")
        running = asyncio.create_task(collect(waiting.house.coordinator, request(params=LONG)))
        await waiting.time.run_until(waiting.is_waiting)
        link.sever()
        await waiting.house.settle()
        assert waiting.time.num_pending <= 1, "of the wait no timer is left"
        waiting.house.add_target(TimedTarget(time=waiting.time), "third")
        await waiting.time.run_until(running.done)
        assert text_of(await running) == plain_text([1, 2, 3], LONG)


@pytest.mark.parametrize("budget", ["fixed", "adaptive"])
async def test_no_wait_is_made_where_none_is_allowed(budget: str) -> None:
    async with stage(budget=budget, max_draft_wait_ms=0.0) as eager:
        running = asyncio.create_task(
            collect(eager.house.coordinator, request(params=replace(GREEDY, max_tokens=60)))
        )
        while not running.done():
            await eager.time.run_until(lambda: running.done() or eager.is_waiting())
            assert not eager.is_waiting()
        await running


@pytest.mark.parametrize(("max_draft_tokens", "outcome"), [(4, "miss"), (2, "hit")])
async def test_it_is_counted_whether_drafts_go_on_behind_a_commit(
    max_draft_tokens: int, outcome: str
) -> None:
    # Of a chain of four all are accepted.  With the draw after them nothing of it is left, but with
    # two taken along one is.
    other = {"miss": "hit", "hit": "miss"}[outcome]
    async with stage(max_draft_tokens=max_draft_tokens) as watched:
        await watched.run()
        assert watched.pre_drafted(outcome) > 20
        assert watched.pre_drafted(other) < 0.25 * watched.pre_drafted(outcome)


@dataclass
class Fickle(TimedDrafter):
    """Has a tree for two of three texts only, and says at once where it has none, if it `tells`."""

    tells: bool = True

    def answer(self, frame: CommitFrame) -> ProposalFrame:
        full = super().answer(frame)
        kept = tuple(each for each in full.proposals if each.base_len % 3)
        completions = tuple(
            Completion(each.request_id, each.generation, each.base_len)
            for each in full.proposals
            if self.tells and not each.base_len % 3
        )
        return replace(full, proposals=kept, completions=completions)


@pytest.mark.parametrize("tells", [True, False])
async def test_nobody_waits_for_what_is_said_not_to_come(tells: bool) -> None:
    time = VirtualTime()
    settings: dict[str, Any] = {"budget": "adaptive", "max_draft_wait_ms": 4.0}
    async with house(drafters=("a",), clock=time, timer=time.timer, **settings) as built:
        target = TimedTarget(time=time)
        drafter = Fickle("a", oracle_chain(3), survival=0.9, time=time, delay_s=0.0009, tells=tells)
        built.add_target(target)
        built.add_drafter(drafter)
        fickle = Stage(built, time, target, drafter)
        await fickle.run()
        assert fickle.waits("arrived") > 20
        if tells:
            assert fickle.waits("late") == 0
        else:
            assert fickle.waits("late") > 20


async def test_a_wait_ends_when_there_is_nothing_more_to_come() -> None:
    def complete(proposal: Proposal) -> Proposal:
        return replace(proposal, is_complete=True)

    longest: list[float] = []
    for spoil in (complete, lambda proposal: proposal):
        async with stage(max_draft_wait_ms=4.0) as trying:
            trying.drafter.spoil = spoil
            longest.append(max(await trying.waited()))
    assert longest[0] < 0.00095 < longest[1]
