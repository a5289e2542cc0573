"""A coordinator that lies to a target: it gets its share of places, and the others their texts.

One target stands for all lies, so what one of them leaves behind there meets the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.core import SamplingParams
from cluster.messages import StepFrame
from cluster.rpc.memory import MemoryLink, memory_pair
from tests.support.coordinator.house import GREEDY, SEEDED, House, collect, house, request, text_of
from tests.support.coordinator.lying_frames import lying_frames
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd, plain_text

# For each budget.
MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PARAMS = (replace(GREEDY, max_tokens=24), replace(SEEDED, max_tokens=24))
NUM_PLACES = 6


@dataclass
class Stack:
    """A running house on an event loop of its own, whose target serves a liar as well."""

    loop: asyncio.AbstractEventLoop
    stage: House
    target: ToyTarget
    most: dict[str, int] = field(default_factory=dict)
    num_steps_of_lies: int = 0
    num_requests: int = 0

    def complete(self, params: SamplingParams, lies: Sequence[StepFrame]) -> list[int]:
        return self.loop.run_until_complete(self._complete(params, lies))

    async def _complete(self, params: SamplingParams, lies: Sequence[StepFrame]) -> list[int]:
        ours, theirs = memory_pair()
        serving = asyncio.create_task(self.target.serve(theirs))
        reading = asyncio.create_task(_read(ours))
        await asyncio.sleep(0)
        self.target.says = self._noted
        # One name for all, and one that the liar uses too.
        running = asyncio.create_task(collect(self.stage.coordinator, request(params=params)))
        for number, lie in enumerate(lies):
            await ours.send(lie)
            await self.target.wait_for_steps(len(self.target.steps) + number % 2)
        events = await running
        self.num_requests += 1
        ours.sever()
        await asyncio.gather(serving, reading, return_exceptions=True)
        assert list(self.target.texts.of(self.stream)) == []
        return text_of(events)

    @property
    def stream(self) -> Any:
        return next(iter(self.target.streams))

    def _noted(self, frame: Any) -> Any:
        honest, *others = self.target.streams
        for name, stream in (("honest", honest), *(("liar", each) for each in others)):
            count = len(self.target.texts.of(stream))
            self.most[name] = max(self.most.get(name, 0), count)
        if others:
            items = self.target.steps[-1] if self.target.steps else ()
            self.num_steps_of_lies += any(
                item.request_id.startswith(others[0].prefix) for item in items
            )
        return frame

    def check(self) -> None:
        """The liar had what is its share, and has cost nobody anything."""
        assert self.loop.run_until_complete(self._contexts_left()) == {}
        assert self.most["honest"] == 1
        assert 1 < self.most["liar"] <= NUM_PLACES // 2
        assert self.num_steps_of_lies > self.num_requests
        metrics = self.stage.coordinator.render_metrics().decode()
        assert "drafthouse_failovers_total 0.0" in metrics
        assert "drafthouse_bookkeeping_faults_total{" not in metrics
        assert 'spec_decode_num_accepted_tokens_total{drafter="a"' in metrics

    async def _contexts_left(self) -> dict[str, list[int]]:
        await self.stage.pass_time(2.0)
        return self.target.contexts


async def _read(link: MemoryLink[Any, Any]) -> None:
    async for _ in link:
        pass


@pytest.fixture(params=["fixed", "adaptive"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    loop, leaving = asyncio.new_event_loop(), AsyncExitStack()
    target = ToyTarget(step_turns=15)

    async def enter() -> House:
        stage = await leaving.enter_async_context(house(["a"], budget=request.param))
        stage.add_target(target, max_running_sequences=NUM_PLACES)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
        return stage

    logging.disable(logging.WARNING)  # a line for every lie
    try:
        yield Stack(loop, loop.run_until_complete(enter()), target)
    finally:
        logging.disable(logging.NOTSET)
        loop.run_until_complete(leaving.aclose())
        loop.close()


def test_a_lying_coordinator_changes_no_text_of_another(stack: Stack) -> None:
    @MANY
    @given(lies=st.lists(lying_frames(), min_size=2, max_size=8), params=st.sampled_from(PARAMS))
    def test(lies: list[StepFrame], params: SamplingParams) -> None:
        assert stack.complete(params, lies) == plain_text([1, 2, 3], params)

    test()
    stack.check()
