"""The faulty link makes exactly the planned faults."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import WorkerError
from cluster.rpc.memory import memory_pair
from tests.support.rpc.faulty import FaultPlan, FaultyLink

COUNT = 200


async def delivered(plan: FaultPlan) -> list[int]:
    """The messages of 0..COUNT-1 that arrive; delays take no time."""
    near, far = memory_pair(window=10 * COUNT)

    async def yield_only(_delay_s: float) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    faulty: FaultyLink[int, int] = FaultyLink(near, plan, yield_only)
    for number in range(COUNT):
        await faulty.send(number)
    for _ in range(10):
        await asyncio.sleep(0)
    await faulty.close()
    return [number async for number in far]


async def test_a_plan_without_faults_changes_nothing() -> None:
    assert await delivered(FaultPlan(seed=1)) == list(range(COUNT))


async def test_the_same_seed_gives_the_same_faults() -> None:
    plan = FaultPlan(seed=3, drop=0.2, duplicate=0.2, reorder=0.2)
    assert await delivered(plan) == await delivered(plan)
    assert await delivered(plan) != await delivered(FaultPlan(4, 0.2, 0.2, reorder=0.2))


async def test_dropped_messages_are_missing_and_the_rest_is_in_order() -> None:
    numbers = await delivered(FaultPlan(seed=1, drop=0.3))
    assert 0 < len(numbers) < COUNT
    assert numbers == sorted(set(numbers))


async def test_exactly_the_listed_messages_are_lost() -> None:
    numbers = await delivered(FaultPlan(seed=1, lost=frozenset([0, 7])))
    assert sorted({*range(COUNT)} - {*numbers}) == [0, 7]


async def test_duplicated_messages_arrive_twice() -> None:
    numbers = await delivered(FaultPlan(seed=1, duplicate=0.3))
    assert COUNT < len(numbers) < 2 * COUNT
    assert set(numbers) == set(range(COUNT))


async def test_delayed_messages_keep_their_order_and_reordered_ones_do_not() -> None:
    assert await delivered(FaultPlan(seed=1, delay=0.3)) == list(range(COUNT))
    numbers = await delivered(FaultPlan(seed=1, reorder=0.3))
    assert sorted(numbers) == list(range(COUNT))
    assert numbers != sorted(numbers)


async def test_the_link_breaks_when_planned() -> None:
    near, far = memory_pair()
    faulty: FaultyLink[int, int] = FaultyLink(near, FaultPlan(seed=1, break_after=2))
    await faulty.send(0)
    await faulty.send(1)
    with pytest.raises(WorkerError, match="as planned"):
        await faulty.send(2)
    assert [number async for number in far] == [0, 1]


async def test_messages_still_delayed_at_the_end_are_lost_silently() -> None:
    near, far = memory_pair()
    faulty: FaultyLink[int, int] = FaultyLink(
        near, FaultPlan(seed=1, reorder=1.0, max_delay_s=3600.0)
    )
    before = asyncio.all_tasks()
    await faulty.send(0)
    await faulty.close()
    assert asyncio.all_tasks() == before
    assert [number async for number in far] == []
