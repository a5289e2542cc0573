"""A drafter that lies in a thousand ways: every request ends with the target's text all the same.

One house stands for all lies, so what one of them leaves behind in its books meets the next.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import Proposal, SamplingParams
from cluster.rpc.channel import connect_drafter
from cluster.rpc.conversations import DRAFTER
from cluster.rpc.server import serve_worker
from tests.support.choices import by_day
from tests.support.coordinator.house import GREEDY, SEEDED, House, at_work
from tests.support.coordinator.lies import LYING, Lie, lies
from tests.support.coordinator.toys import ToyDrafter, oracle_in_a_crowd
from tests.support.rpc.toys import stopping

# Five lies each: every night a thousand within a process, and a thousand on a wire.
NUM_LIES = by_day(120, 1000)
PARAMS = (replace(GREEDY, max_tokens=24), replace(SEEDED, max_tokens=24))


@dataclass
class Told:
    """What the drafter tells: honest proposals and lies by turns."""

    lies: Sequence[Lie] = ()
    num_proposals: int = 0
    num_lies: int = 0

    def spoil(self, proposal: Proposal) -> Proposal:
        self.num_proposals += 1
        if not self.lies or self.num_proposals % 2:
            return proposal
        self.num_lies += 1
        return self.lies[self.num_lies % len(self.lies)].told(proposal)


@dataclass
class Stack:
    """A running house on an event loop of its own, and what its drafter is to tell."""

    loop: asyncio.AbstractEventLoop
    stage: House
    told: Told
    num_requests: int = 0

    def complete(self, params: SamplingParams, told: Sequence[Lie]) -> None:
        """The house looks at the text."""
        self.told.lies = told
        self.num_requests += 1
        # What was learned of a task lasts for its next request.
        task = f"task-{self.num_requests % 100}"
        asking = self.stage.ask(params=params, id=f"r{self.num_requests}", task=task)
        self.loop.run_until_complete(asking)

    def check(self) -> None:
        """The liar has cost nobody anything, and is in the pool still."""
        self.loop.run_until_complete(self.stage.pass_time(2.0))
        assert self.stage.target_ids() == ["target-0"]
        assert [each["name"] for each in self.stage.status()["drafters"]] == ["a"]
        metrics = self.stage.metrics()
        assert "drafthouse_failovers_total 0.0" in metrics
        assert "drafthouse_bookkeeping_faults_total{" not in metrics
        assert self.told.num_lies >= NUM_LIES
        # Trees were verified, and learned from, between the lies.
        assert 'drafthouse_accepted_draft_tokens_total{drafter="a"' in metrics
        assert 'drafter_faults_total{drafter="a",why="rubbish"}' in metrics


@pytest.fixture(params=["in process", "over the wire"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    told, loop, leaving = Told(), asyncio.new_event_loop(), AsyncExitStack()

    async def enter() -> House:
        running = at_work(budget="adaptive", breaker_failures=10**9)
        stage = await leaving.enter_async_context(running)
        liar = ToyDrafter("a", oracle_in_a_crowd(1), spoil=told.spoil)
        if request.param == "in process":
            stage.add_drafter(liar)
            return stage
        lying = replace(DRAFTER, answers=LYING)
        served = await leaving.enter_async_context(
            stopping(await serve_worker(liar, service=lying))
        )
        stage.coordinator.add_drafter("a", "r0", *await connect_drafter(served.address))
        return stage

    logging.disable(logging.WARNING)  # a line for every lie
    try:
        yield Stack(loop, loop.run_until_complete(enter()), told)
    finally:
        logging.disable(logging.NOTSET)
        loop.run_until_complete(leaving.aclose())
        loop.close()


def test_many_lies_change_no_text(stack: Stack):
    @settings(max_examples=NUM_LIES // 4)
    @given(told=st.lists(lies(), min_size=4, max_size=8), params=st.sampled_from(PARAMS))
    def test(told: list[Lie], params: SamplingParams) -> None:
        stack.complete(params, told)

    test()
    stack.check()
