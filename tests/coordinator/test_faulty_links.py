"""Frames that are lost, doubled, late or out of order cost speed, never text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.core import SamplingParams
from cluster.rpc.link import memory_pair
from tests.support.choices import by_day, pairwise
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    House,
    at_work,
    house,
    turns,
)
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    drafter_description,
    oracle_in_a_crowd,
)
from tests.support.rpc.faulty import FaultPlan, FaultyLink

pytestmark = pytest.mark.usefixtures("budget")


def add_faulty_drafter(stage: House, toy: ToyDrafter, there: FaultPlan, back: FaultPlan) -> None:
    ours, theirs = memory_pair()
    stage.tasks.append(asyncio.create_task(toy.serve(FaultyLink(theirs, back, turns))))
    link = FaultyLink(ours, there, turns)
    stage.coordinator.add_drafter(toy.name, "r0", drafter_description(toy.name), link)


@pairwise(params=(GREEDY, SEEDED), seed=range(by_day(1, 5)))
async def test_a_faulty_drafter_link_does_not_change_the_text(
    params: SamplingParams, seed: int
) -> None:
    there = FaultPlan(seed, drop=0.2, duplicate=0.2, delay=0.1, reorder=0.3, max_delay_s=0.1)
    back = replace(there, seed=seed + 100)
    async with at_work(breaker_failures=1000) as stage:
        add_faulty_drafter(stage, ToyDrafter("a", oracle_in_a_crowd(seed)), there, back)
        running = stage.begin(params=replace(params, max_tokens=200))
        await stage.settle(5)
        (own,) = stage.coordinator._pool[0].subscriptions.values()
        stats = (await running)[-1].stats
        # It loses its place again and again, and is sent the rest each time.
        assert stats.num_accepted_draft_tokens > 0
        assert len(own.expected) < 16, "each answer is one to the commits before as well"


SHUFFLED = FaultPlan(0, duplicate=0.3, delay=0.1, reorder=0.4, max_delay_s=0.05)
LOSSY = replace(SHUFFLED, drop=0.15)


@pairwise(params=(GREEDY, SEEDED), plan=(SHUFFLED, LOSSY), seed=range(by_day(1, 5)))
async def test_a_faulty_target_link_does_not_change_the_text(
    params: SamplingParams, plan: FaultPlan, seed: int
) -> None:
    there, back = replace(plan, seed=seed), replace(plan, seed=seed + 100)
    async with house() as stage:
        toy = ToyTarget()
        stage.add_target(toy, there=there, back=back)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(seed)))
        running = [stage.begin([i, 2, 3], replace(params, seed=i), id=f"r{i}") for i in range(4)]
        while not all(each.done() for each in running):
            await stage.pass_time(1.0)
        await asyncio.gather(*running)
        assert [target["id"] for target in stage.status()["targets"]] == ["target-0"]
        for _ in range(20):  # what was lost of the cancels is made up for by heartbeats
            await stage.pass_time(1.0)
        assert toy.contexts == {}
        assert list(toy.texts) == []


async def test_a_drafter_whose_link_breaks_again_and_again_is_left_alone_for_a_while() -> None:
    async with at_work(breaker_failures=2, breaker_reset_s=60.0) as stage:
        for _ in range(2):
            link = stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
            link.sever()
            await stage.settle(10)
        drafter = ToyDrafter("a", oracle_in_a_crowd(1))
        stage.add_drafter(drafter)
        await stage.ask(id="one")
        assert drafter.frames == []
        stage.clock.now += 61.0
        await stage.ask(id="two")
        assert drafter.frames != []


async def test_a_session_moves_to_another_replica_when_its_own_is_lost() -> None:
    target = ToyTarget()
    async with house() as stage:
        stage.add_target(target)
        replicas = [ToyDrafter("a", oracle_in_a_crowd(i)) for i in range(2)]
        links = [stage.add_drafter(toy, f"r{i}") for i, toy in enumerate(replicas)]
        params = replace(GREEDY, max_tokens=300)
        running = stage.begin(params=params)
        await target.wait_for_steps(5)
        first = 0 if replicas[0].frames else 1
        assert replicas[1 - first].frames == []
        links[first].sever()
        await running
        assert replicas[1 - first].frames[0].commits[0].base_len == 0


async def test_sessions_of_a_stalled_replica_move_to_a_free_one() -> None:
    async with house(breaker_reset_s=2.0) as stage:
        target = ToyTarget()
        stage.add_target(target)
        stalled = ToyDrafter("a", oracle_in_a_crowd(1))
        stalled.gate.clear()
        stage.add_drafter(stalled, "r0")
        params = replace(GREEDY, max_tokens=300)
        running = stage.begin(params=params)
        await target.wait_for_steps(5)
        other = ToyDrafter("a", oracle_in_a_crowd(2))
        stage.add_drafter(other, "r1")
        stage.clock.now += 2.5
        stage.coordinator.tick()
        await running
        assert other.frames != []


async def test_requests_spread_over_the_replicas_of_a_drafter() -> None:
    async with house() as stage:
        target = ToyTarget()
        target.gate.clear()
        stage.add_target(target)
        replicas = [ToyDrafter("a", oracle_in_a_crowd(i)) for i in range(3)]
        for index, toy in enumerate(replicas):
            stage.add_drafter(toy, f"r{index}")
        tasks = [stage.begin(id=f"q{i}") for i in range(6)]
        await stage.settle(20)
        assert [len(toy.contexts) for toy in replicas] == [2, 2, 2]
        target.gate.set()
        await asyncio.gather(*tasks)
