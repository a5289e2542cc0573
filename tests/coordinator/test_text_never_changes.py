"""The law of the house: drafters and accidents cost speed, never text.  So do frames that are lost,
doubled, late or out of order."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import Proposal, SamplingParams
from tests.support.choices import by_day, pairwise
from tests.support.coordinator.house import GREEDY, LAWS, SEEDED, at_work, house
from tests.support.coordinator.toys import (
    Grow,
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    oracle_in_a_crowd,
    random_tree,
)
from tests.support.rpc.faulty import FaultPlan

pytestmark = pytest.mark.usefixtures("budget")


@LAWS
@pytest.mark.parametrize(
    "grow",
    [oracle_chain(), oracle_in_a_crowd(1), random_tree(3, 40)],
    ids=["oracle", "crowd", "random"],
)
async def test_a_drafter_does_not_change_the_text(grow: Grow, params: SamplingParams):
    async with at_work(ToyDrafter("a", grow)) as stage:
        await stage.ask(params=params)


def _lie(proposal: Proposal) -> Proposal:
    return replace(proposal, survival=proposal.survival[:-1])


async def test_rubbish_opens_the_breaker_until_the_drafter_behaves_and_the_text_goes_on():
    drafter = ToyDrafter("a", oracle_chain(), spoil=_lie)
    async with at_work(drafter, breaker_reset_s=5.0) as stage:
        await stage.ask(id="one")
        await stage.settle()
        metrics = stage.metrics()
        assert 'drafthouse_drafter_faults_total{drafter="a",why="rubbish"} 3.0' in metrics
        assert stage.status()["drafters"][0]["breaker"] == "open"
        assert drafter.released == ["one"]
        drafter.spoil = lambda proposal: proposal
        before = len(drafter.frames)
        await stage.ask(id="two")
        assert len(drafter.frames) == before
        stage.clock.now += 5.0
        events = await stage.ask(id="three")
        assert stage.status()["drafters"][0]["breaker"] == "closed"
        assert events[-1].stats.num_accepted_draft_tokens > 0


async def test_a_silent_drafter_is_never_waited_for():
    async with at_work(ToyDrafter("a", oracle_chain(), is_held=True)) as stage:
        events = await stage.ask()
    assert events[-1].stats.num_draft_tokens == 0
    assert events[-1].stats.idle_because == "no_drafts"


async def test_a_blocked_drafter_link_gets_few_long_commits_instead_of_many_short_ones():
    drafter = ToyDrafter("a", random_tree(1), is_held=True)
    async with at_work(drafter) as stage:
        await stage.ask(params=replace(GREEDY, max_tokens=400))
        drafter.gate.set()
        await stage.settle()
        # The window of the link is 64 frames; what comes after waits as a name, not as frames.
        assert len(drafter.frames) <= 64 + 4
        assert drafter.contexts == {}


async def test_a_drafter_that_dies_and_returns_costs_only_speed():
    async with at_work(breaker_failures=10) as stage:
        running = stage.begin(params=replace(SEEDED, max_tokens=120))
        for life in range(4):
            link = stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(life)))
            await stage.settle(12)
            link.sever()
            await stage.settle(6)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(9)))
        events = await running
        assert events[-1].stats.num_accepted_draft_tokens > 0


async def test_a_target_that_forgets_a_text_is_sent_all_of_it_again():
    toy = ToyTarget()
    async with at_work(toy, ToyDrafter("a", oracle_in_a_crowd(2))) as stage:
        running = stage.begin(params=replace(SEEDED, max_tokens=200))
        for life in range(1, 4):
            await toy.wait_for_steps(len(toy.steps) + 5)
            toy.forget("r")
            await stage.settle()
            assert not running.done()
            assert toy.contexts == {}
            await stage.pass_time(1.0)
            *before, former, latter = toy.opens
            assert len(before) == life - 1
            assert len(latter.token_ids) > len(former.token_ids)
        await running
        assert "drafthouse_failovers_total 0.0" in stage.metrics()


async def test_another_target_takes_over_in_mid_text():
    async with house() as stage:
        first, second = ToyTarget(), ToyTarget()
        link = stage.add_target(first, "one")
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(2)))
        running = stage.begin(params=replace(SEEDED, max_tokens=200))
        await first.wait_for_steps(5)
        stage.add_target(second, "two")
        link.sever()
        await running
        assert second.steps
        assert "drafthouse_failovers_total 1.0" in stage.metrics()


async def test_many_requests_at_once_each_get_their_own_text():
    async with at_work(ToyDrafter("a", oracle_in_a_crowd(7))) as stage:
        running = [
            stage.begin(
                [i, i + 1, (i * 7) % 32],
                replace(SEEDED if i % 2 else GREEDY, max_tokens=20 + i),
                id=f"r{i}",
                task="code" if i % 3 else "chat",
            )
            for i in range(12)
        ]
        await asyncio.gather(*running)


# Links that lose, double, delay and reorder frames, and drafters behind such links.


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
        await stage.pass_time(20.0)  # heartbeats make up for what was lost of the cancels
        assert toy.contexts == {}
        assert list(toy.texts) == []


async def test_a_drafter_whose_link_breaks_again_and_again_is_left_alone_for_a_while():
    async with at_work(breaker_failures=2, breaker_reset_s=60.0) as stage:
        for _ in range(2):
            stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1))).sever()
            await stage.settle(10)
        assert stage.status()["faults"] == {"a": {"link": 2}}
        drafter = ToyDrafter("a", oracle_in_a_crowd(1))
        stage.add_drafter(drafter)
        await stage.ask(id="one")
        assert drafter.frames == []
        stage.clock.now += 61.0
        await stage.ask(id="two")
        assert drafter.frames != []


@pytest.mark.parametrize("is_lost", [True, False])
async def test_sessions_of_a_replica_that_is_lost_or_stalls_move_to_another(*, is_lost: bool):
    target, other = ToyTarget(), ToyDrafter("a", oracle_in_a_crowd(1))
    first = ToyDrafter("a", oracle_in_a_crowd(0), is_held=True)
    async with at_work(target, breaker_reset_s=2.0) as stage:
        link = stage.add_drafter(first)
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
