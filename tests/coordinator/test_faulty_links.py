"""Frames that are lost, doubled, late or out of order cost speed, never text."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import SamplingParams
from tests.support.choices import by_day, pairwise
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    at_work,
    house,
)
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_in_a_crowd,
)
from tests.support.rpc.faulty import FaultPlan

pytestmark = pytest.mark.usefixtures("budget")


@pairwise(params=(GREEDY, SEEDED), seed=range(by_day(1, 5)))
async def test_a_faulty_drafter_link_does_not_change_the_text(params: SamplingParams, seed: int):
    there = FaultPlan(seed, drop=0.2, duplicate=0.2, delay=0.1, reorder=0.3, max_delay_s=0.1)
    back = replace(there, seed=seed + 100)
    async with at_work(breaker_failures=1000) as stage:
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(seed)), there=there, back=back)
        stats = (await stage.ask(params=replace(params, max_tokens=200)))[-1].stats
        # It loses its place again and again, and is sent the rest each time.
        assert stats.num_accepted_draft_tokens > 0


SHUFFLED = FaultPlan(0, duplicate=0.3, delay=0.1, reorder=0.4, max_delay_s=0.05)
LOSSY = replace(SHUFFLED, drop=0.15)


@pairwise(params=(GREEDY, SEEDED), plan=(SHUFFLED, LOSSY), seed=range(by_day(1, 5)))
async def test_a_faulty_target_link_does_not_change_the_text(
    params: SamplingParams, plan: FaultPlan, seed: int
):
    there, back = replace(plan, seed=seed), replace(plan, seed=seed + 100)
    async with house() as stage:
        toy = ToyTarget()
        stage.add_target(toy, there=there, back=back)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(seed)))
        running = [stage.begin([i, 2, 3], replace(params, seed=i), id=f"r{i}") for i in range(4)]
        await stage.finish(*running)
        assert stage.target_ids() == ["target-0"]
        for _ in range(20):  # what was lost of the cancels is made up for by heartbeats
            await stage.pass_time(1.0)
        assert toy.contexts == {}
        assert list(toy.texts) == []


async def test_a_drafter_whose_link_breaks_again_and_again_is_left_alone_for_a_while():
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


@pytest.mark.parametrize("is_lost", [True, False])
async def test_sessions_of_a_replica_that_is_lost_or_stalls_move_to_another(*, is_lost: bool):
    target, first, other = ToyTarget(), *(ToyDrafter("a", oracle_in_a_crowd(i)) for i in range(2))
    async with at_work(target, breaker_reset_s=2.0) as stage:
        first.gate.clear()
        link = stage.add_drafter(first, "r0")
        running = stage.begin(params=replace(GREEDY, max_tokens=300))
        await target.wait_for_steps(5)
        stage.add_drafter(other, "r1")
        assert first.frames
        assert other.frames == []
        if is_lost:
            link.sever()
        else:
            stage.clock.now += 2.5
            stage.coordinator.tick()
        await running
        assert other.commits[0].base_len == 0


async def test_requests_spread_over_the_replicas_of_a_drafter():
    target = ToyTarget(is_held=True)
    async with at_work(target) as stage:
        replicas = [ToyDrafter("a", oracle_in_a_crowd(i)) for i in range(3)]
        for index, toy in enumerate(replicas):
            stage.add_drafter(toy, f"r{index}")
        tasks = [stage.begin(id=f"q{i}") for i in range(6)]
        await stage.settle(20)
        assert [len(toy.contexts) for toy in replicas] == [2, 2, 2]
        target.gate.set()
        await asyncio.gather(*tasks)
