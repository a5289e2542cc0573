"""Sequences that decode together go on together.  The test plays the target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.messages import CacheMiss, StepReport, VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.memory import MemoryLink, memory_pair
from tests.support.coordinator.house import House, collect, house, request
from tests.support.coordinator.toys import ToyTarget, target_description


class PlayedTarget:
    """The target's end of a link: frames pile up until the test answers them."""

    def __init__(self, stage: House, link: MemoryLink[Any, Any]) -> None:
        self.stage = stage
        self.link = link
        self.toy = ToyTarget()
        self.frames: list[VerifyFrame] = []

    async def read(self) -> None:
        async for frame in self.link:
            self.frames.append(frame)

    async def take(self) -> VerifyFrame:
        """The only frame that has come since the last one."""
        await self.stage.settle(30)
        (frame,) = self.frames
        self.frames.clear()
        return frame

    async def answer(self, frame: VerifyFrame) -> None:
        await self.link.send(self.toy.answer(frame))

    async def start(self, *names: str) -> VerifyFrame:
        """Open requests and prefill them together; returns their first batch."""
        for name in names:
            collecting = collect(self.stage.coordinator, request(id=name))
            self.stage.tasks.append(asyncio.create_task(collecting))
        await self.stage.settle(30)
        prefills, self.frames = self.frames, []
        items = tuple(item for frame in prefills for item in frame.items)
        await self.answer(VerifyFrame(items))
        return await self.take()


@asynccontextmanager
async def played(
    description: WorkerDescription | None = None, **settings: Any
) -> AsyncIterator[PlayedTarget]:
    async with house(drafters=(), **settings) as stage:
        ours, theirs = memory_pair()
        target = PlayedTarget(stage, theirs)
        stage.tasks.append(asyncio.create_task(target.read()))
        description = description or target_description("played")
        stage.coordinator.add_target("played", description, ours)
        yield target


def names(frame: VerifyFrame) -> set[str]:
    return {item.request_id for item in frame.items}


def only(frame: VerifyFrame, *wanted: str) -> VerifyFrame:
    return replace(frame, items=tuple(item for item in frame.items if item.request_id in wanted))


async def prefill_newcomer(target: PlayedTarget, name: str) -> None:
    collecting = collect(target.stage.coordinator, request(id=name))
    target.stage.tasks.append(asyncio.create_task(collecting))
    await target.answer(await target.take())
    await target.stage.settle(30)


async def test_a_report_of_no_step_does_not_split_the_batch_in_flight() -> None:
    async with played() as target:
        batch = await target.start("a", "b")
        await prefill_newcomer(target, "c")
        await target.link.send(VerdictFrame(report=StepReport(pages_total=100)))
        await target.stage.settle(30)
        assert target.frames == []
        await target.answer(batch)
        assert names(await target.take()) == {"a", "b", "c"}


async def test_a_step_that_could_do_nothing_lets_the_ready_ones_go() -> None:
    async with played() as target:
        await target.start("a", "b")
        await prefill_newcomer(target, "c")
        await target.link.send(VerdictFrame(report=StepReport(step_time_s=0.001)))
        assert names(await target.take()) == {"c"}


async def test_a_request_that_is_cancelled_in_flight_does_not_split_its_batch() -> None:
    async with played() as target:
        batch = await target.start("a", "b", "gone")
        await prefill_newcomer(target, "c")
        target.stage.coordinator.cancel("gone")
        assert (await target.take()).released == ("gone",)
        await target.link.send(VerdictFrame(report=StepReport(pages_total=100)))
        await target.stage.settle(30)
        assert target.frames == []
        await target.answer(only(batch, "a", "b"))
        assert names(await target.take()) == {"a", "b", "c"}


async def test_a_batch_split_by_a_miss_is_whole_again_after_a_round() -> None:
    async with played() as target:
        batch = await target.start("a", "b", "c")
        missed = next(item for item in batch.items if item.request_id == "a")
        await target.link.send(
            VerdictFrame(misses=(CacheMiss("a", missed.generation, 0),))  # before the step
        )
        await target.answer(await target.take())
        alone = await target.take()
        assert names(alone) == {"a"}
        await target.answer(only(batch, "b", "c"))
        await target.stage.settle(30)
        assert target.frames == [], "they wait for the one that fell behind"
        await target.answer(alone)
        assert names(await target.take()) == {"a", "b", "c"}


async def test_steps_are_timed_by_the_target_although_a_prefill_is_always_outstanding() -> None:
    async with played() as target:
        batch = await target.start("a", "b")
        collecting = collect(target.stage.coordinator, request(id="c"))
        target.stage.tasks.append(asyncio.create_task(collecting))
        await target.take()  # its prefill, which is never answered
        for _ in range(2):
            target.stage.clock.now += 5.0  # the batch waits for a chunk of the prefill
            await target.answer(batch)
            batch = await target.take()
        (status,) = target.stage.coordinator.status()["targets"]
        assert status["prefilling"] == 1
        assert status["step_time_s"] == pytest.approx(0.002), "the target's word, without the wait"
        assert target.stage.coordinator.status()["recent_rounds"] == []
