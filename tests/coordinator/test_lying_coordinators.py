"""A coordinator that lies to a target: it gets its share of places and steps, the others theirs.

One stream is the liar's for the whole test, so what one lie leaves behind there meets the next.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings

from cluster.rpc.link import Link, memory_pair
from cluster.rpc.messages import StepFrame
from tests.support.choices import by_day
from tests.support.coordinator.house import GREEDY, SEEDED, House, house
from tests.support.coordinator.lying_frames import lying_frames
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd

NUM_LIES = by_day(60, 125)  # frames for each budget
# What each is to hold at least, on an average: texts, cancels, trees, acknowledgements.
NUM_ACTS = 4
# Lies in which an honest text ends at least; it takes five or six.
NUM_SLOW = 9
PARAMS = (replace(GREEDY, max_tokens=24), replace(SEEDED, max_tokens=24))
NUM_PLACES = 6
NUM_ROWS = 4  # of a step: fewer than there are places, more than honest texts: drafts have room
NUM_HONEST = 2  # texts at a time
STEP_TURNS = 6  # of the event loop


@dataclass
class Stack:
    """A running house on an event loop of its own, whose target serves a liar as well."""

    loop: asyncio.AbstractEventLoop
    stage: House
    target: ToyTarget
    most: dict[str, int] = field(default_factory=dict)
    num_acts: int = 0
    num_texts: int = 0
    num_seen: int = 0
    num_crowded: int = 0  # steps for which not all texts had room
    num_missed: int = 0  # of these, those without any honest text
    writing: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    async def connect(self) -> None:
        self.ours, theirs = memory_pair()
        self.tasks = [
            asyncio.create_task(self.target.serve(theirs)),
            asyncio.create_task(_read(self.ours)),
        ]
        await asyncio.sleep(0)
        self.honest, self.liar = self.target.streams
        self.target.says = self._noted

    async def act(self, lie: StepFrame) -> None:
        """Send a lie while honest texts run, and look at those that have ended."""
        for number in range(NUM_HONEST):
            await self._write(f"r{number or ''}")  # one has a name that the liar uses too
        await self.ours.send(lie)
        self.num_acts += len(lie.opens) + len(lie.cancels) + len(lie.trees) + 1
        await self.stage.settle(STEP_TURNS + 2)

    async def _write(self, name: str) -> None:
        running = self.writing.get(name)
        if running is not None and not running.done():
            return
        if running is not None:
            await running
            self.num_texts += 1
        params = PARAMS[self.num_texts % len(PARAMS)]
        self.writing[name] = self.stage.begin(params=params, id=name)

    def _noted(self, frame: Any) -> Any:
        """Count the texts that each has, and the steps that left some out."""
        for name, stream in (("honest", self.honest), ("liar", self.liar)):
            count = len(self.target.texts.of(stream))
            self.most[name] = max(self.most.get(name, 0), count)
        for items in self.target.steps[self.num_seen :]:
            if len(items) == NUM_ROWS:
                self.num_crowded += 1
                self.num_missed += not any(
                    item.request_id.startswith(self.honest.prefix) for item in items
                )
        self.num_seen = len(self.target.steps)
        return frame

    async def end(self) -> None:
        for running in self.writing.values():
            await running
        self.ours.sever()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.stage.pass_time(2.0)
        assert self.target.contexts == {}


async def _read(link: Link[Any, Any]) -> None:
    """Acknowledge nothing: what the liar says of that is among its lies."""
    async for _ in link:
        pass


@pytest.fixture(params=by_day(["adaptive"], ["fixed", "adaptive"]))
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    loop, leaving = asyncio.new_event_loop(), AsyncExitStack()
    target = ToyTarget(step_turns=STEP_TURNS)

    async def enter() -> Stack:
        stage = await leaving.enter_async_context(house(["a"], budget=request.param))
        stage.add_target(target, max_running_sequences=NUM_PLACES, max_batch_tokens=NUM_ROWS)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
        built = Stack(loop, stage, target)
        await built.connect()
        return built

    logging.disable(logging.WARNING)  # a line for every lie
    try:
        yield loop.run_until_complete(enter())
    finally:
        logging.disable(logging.NOTSET)
        loop.run_until_complete(leaving.aclose())
        loop.close()


def test_a_lying_coordinator_changes_no_text_of_another_and_takes_no_more_than_its_share(
    stack: Stack,
):
    @settings(max_examples=NUM_LIES)
    @given(lie=lying_frames())
    def test(lie: StepFrame) -> None:
        stack.loop.run_until_complete(stack.act(lie))

    test()
    stack.loop.run_until_complete(stack.end())
    assert stack.num_acts >= NUM_ACTS * NUM_LIES
    assert stack.num_texts * NUM_SLOW > NUM_LIES
    assert stack.most["honest"] == NUM_HONEST
    assert 1 < stack.most["liar"] <= NUM_PLACES // 2
    # Two texts of at most five: in most steps one of the rows was theirs.
    assert stack.num_crowded > 10
    assert 3 * stack.num_missed < stack.num_crowded
    metrics = stack.stage.metrics()
    assert "drafthouse_failovers_total 0.0" in metrics
    assert "drafthouse_bookkeeping_faults_total{" not in metrics
    assert 'drafthouse_accepted_draft_tokens_total{drafter="a"' in metrics
