"""Five times as much as the target can do: who is let in is served in time, and the rest is told at
once."""

import asyncio
from collections import Counter

import pytest

from cluster.core import SamplingParams, TokenEvent
from cluster.errors import CapacityError
from tests.support.choices import by_day
from tests.support.coordinator.house import House, at_work
from tests.support.coordinator.toys import ToyTarget

SEATS, NUM_TOKENS, STEP_S = 4, 10, 0.1
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


class Crowd:
    """Clients that come, whatever the answers, and go when their time is over."""

    def __init__(self, stage: House, timeout_s: float) -> None:
        self._stage = stage
        self._timeout_s = timeout_s
        self._asking = {}
        self._count = 0
        self.ends: Counter[str] = Counter()

    def come(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            end = self._stage.clock.now + self._timeout_s
            self._asking[asyncio.create_task(self._ask(f"r{self._count}"))] = end

    async def _ask(self, name: str) -> str:
        try:
            await self._stage.ask(id=name, params=PARAMS, timeout_s=self._timeout_s)
        except CapacityError:
            return "refused"
        return "served"

    def leave(self) -> None:
        """Those whose time is over hang up, as the ingress does for them."""
        for task, end in list(self._asking.items()):
            if task.done():
                self.ends[task.result()] += 1
                del self._asking[task]
            elif self._stage.clock.now >= end:
                self.ends["late"] += 1
                task.cancel()
                del self._asking[task]


async def one_step(stage: House, target: ToyTarget) -> None:
    """A step of the target, which takes its time."""
    before = len(target.steps)
    target.gate.set()
    async with asyncio.timeout(20):
        while len(target.steps) == before:
            await stage.settle(1)
    target.gate.clear()
    await stage.settle(30)
    stage.clock.now += STEP_S


async def test_at_five_times_its_capacity_nine_tenths_of_it_are_answers_in_time():
    target = ToyTarget(step_turns=1, is_held=True)
    async with at_work(target, drafters=(), max_running_sequences=SEATS) as stage:
        crowd, num_steps, owed = Crowd(stage, timeout_s=4.0), by_day(200, 400), 0.0
        for number in range(num_steps):
            owed += 5 * SEATS / NUM_TOKENS
            crowd.come(int(owed))
            owed -= int(owed)
            await stage.settle(30)
            await one_step(stage, target)
            crowd.leave()
            stage.coordinator.tick()
            if number % 10 == 0:
                target.beat()
    possible = SEATS * num_steps / NUM_TOKENS
    assert crowd.ends["served"] >= 0.9 * possible
    assert crowd.ends["refused"] > 3 * possible


async def fill(stage: House, *lengths: int) -> list[asyncio.Task[list[TokenEvent]]]:
    """Ask for prompts of such lengths."""
    tasks = []
    for length in lengths:
        tasks.append(stage.begin([1] * length, id=f"of {length}"))
        await stage.settle(30)
    return tasks


async def test_the_queue_is_bounded_in_tokens():
    target = ToyTarget(is_held=True)
    async with at_work(target, max_running_sequences=1, max_queued_tokens=100) as stage:
        tasks = await fill(stage, 3, 300)  # one may wait, however long
        with pytest.raises(CapacityError, match="300 tokens of 1 prompts are waiting"):
            await stage.ask(id="late")
        tasks[1].cancel()
        await stage.settle(30)
        tasks += await fill(stage, 60, 40)
        with pytest.raises(CapacityError, match="max_queued_tokens"):
            await stage.ask(id="late")
        target.gate.set()
        await asyncio.gather(tasks[0], *tasks[2:])


async def test_nobody_is_refused_for_a_deadline_before_anybody_was_served():
    target = ToyTarget(is_held=True)
    async with at_work(target, max_running_sequences=1) as stage:
        tasks = await fill(stage, 3)
        tasks.append(stage.begin(id="hurried", timeout_s=0.001))
        await stage.settle(30)
        assert stage.status()["num_waiting"] == 1
        target.gate.set()
        await asyncio.gather(*tasks)
