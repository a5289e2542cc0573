"""Two batches by turns at a target.  The test plays the target."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from cluster.messages import CacheMiss, StepReport, VerdictFrame, VerifyFrame
from tests.coordinator.test_cohorts import PlayedTarget, names, played, prefill_newcomer
from tests.support.coordinator.house import collect, house, request
from tests.support.coordinator.toys import target_description
from tests.support.coordinator.virtual_time import TimedTarget, VirtualTime


async def start(target: PlayedTarget, *wanted: str) -> list[VerifyFrame]:
    """Open requests and prefill them together; returns the batches that follow."""
    for name in wanted:
        collecting = collect(target.stage.coordinator, request(id=name))
        target.stage.tasks.append(asyncio.create_task(collecting))
    await target.stage.settle(30)
    prefills, target.frames = target.frames, []
    assert not any(frame.is_apart for frame in prefills)
    await target.answer(VerifyFrame(tuple(item for frame in prefills for item in frame.items)))
    return await arrived(target)


async def arrived(target: PlayedTarget) -> list[VerifyFrame]:
    """What has come since the last time."""
    await target.stage.settle(30)
    frames, target.frames = target.frames, []
    return frames


async def test_each_half_is_a_step_of_its_own_and_goes_on_while_the_other_is_computed() -> None:
    async with played(cohorts="two") as target:
        first, second = await start(target, "a", "b", "c", "d", "e")
        assert len(first.items) == 3
        assert names(first) | names(second) == {"a", "b", "c", "d", "e"}
        assert first.is_apart
        assert second.is_apart
        for _ in range(3):
            await target.answer(first)
            (again,) = await arrived(target)
            assert names(again) == names(first), "queued behind the other half"
            first, second = second, again


async def test_one_cohort_waits_for_the_whole_batch() -> None:
    async with played(cohorts="one") as target:
        (batch,) = await start(target, "a", "b", "c", "d")
        assert names(batch) == {"a", "b", "c", "d"}
        assert not batch.is_apart


async def test_a_few_ready_ones_wait_for_the_next_batch_to_join() -> None:
    async with played(cohorts="two") as target:
        first, second = await start(target, "a", "b", "c", "d", "e", "f")
        await prefill_newcomer(target, "late")
        assert await arrived(target) == [], "two batches are under way already"
        await target.answer(first)
        (again,) = await arrived(target)
        assert names(again) == names(first) | {"late"}
        for name in names(second):
            target.stage.coordinator.cancel(name)
        await arrived(target)
        await prefill_newcomer(target, "lone")
        assert await arrived(target) == [], "one of five is no cohort while the others compute"
        await target.answer(again)
        halves = await arrived(target)
        assert sorted(len(frame.items) for frame in halves) == [2, 3]
        assert set.union(*map(names, halves)) == names(again) | {"lone"}


async def test_a_miss_in_one_half_does_not_hold_up_the_other() -> None:
    async with played(cohorts="two") as target:
        first, second = await start(target, "a", "b", "c", "d")
        missed = first.items[0]
        await target.link.send(
            VerdictFrame(misses=(CacheMiss(missed.request_id, missed.generation, 0),))
        )
        (prefill,) = await arrived(target)
        assert names(prefill) == {missed.request_id}
        await target.answer(second)
        (again,) = await arrived(target)
        assert names(again) == names(second)


async def test_a_step_that_could_do_nothing_holds_up_neither() -> None:
    async with played(cohorts="two") as target:
        await start(target, "a", "b", "c", "d")
        await prefill_newcomer(target, "e")
        await target.link.send(VerdictFrame(report=StepReport(step_time_s=0.001)))
        (frame,) = await arrived(target)
        assert names(frame) == {"e"}


async def test_a_queued_round_takes_no_longer_than_its_target_works_for_it() -> None:
    """Planning and the way are hidden behind the other batch's step."""
    time = VirtualTime()
    async with house(drafters=(), clock=time, timer=time.timer, cohorts="two") as stage:
        stage.add_target(TimedTarget(time=time, step_s=0.010))
        texts = [
            asyncio.create_task(collect(stage.coordinator, request(id=f"r{i}"))) for i in range(4)
        ]
        began = time.now
        await time.run_until(lambda: all(text.done() for text in texts))
        seconds = time.now - began
    # A prefill step, and 39 tokens for each half: the target is never idle.
    assert 0.79 <= seconds < 0.85


async def test_a_target_decides_by_its_own_curve_and_a_cpu_shares_its_cores() -> None:
    """The toy says 2 ms for every step, and each round takes 5 ms more outside of it."""
    rows, times_s = (1, 2, 4, 8, 16), (0.0005, 0.001, 0.002, 0.004, 0.008)
    for devices, expected in ((("host/gpu-0",), 2), (("host/cpu0",), 1)):
        description = replace(
            target_description("played"), devices=devices, step_rows=rows, step_times_s=times_s
        )
        async with played(description) as target:
            frames = await start(target, "a", "b", "c", "d")
            most = len(frames)
            for _ in range(34):
                target.stage.clock.now += 0.007
                await target.answer(frames[0])
                frames = await arrived(target)
                most = max(most, len(frames))
            assert most == expected
