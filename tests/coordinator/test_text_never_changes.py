"""The law of the house: drafters and accidents cost speed, never text."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import Proposal, SamplingParams
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    at_work,
    house,
)
from tests.support.coordinator.toys import (
    Grow,
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    oracle_in_a_crowd,
    random_tree,
)

pytestmark = pytest.mark.usefixtures("budget")

LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


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
        stats = events[-1].stats
        assert stats.num_accepted_draft_tokens > 0


async def test_a_silent_drafter_is_never_waited_for():
    async with at_work() as stage:
        drafter = ToyDrafter("a", oracle_chain())
        drafter.gate.clear()
        stage.add_drafter(drafter)
        events = await stage.ask()
    assert events[-1].stats.num_draft_tokens == 0
    assert events[-1].stats.idle_because == "no_drafts"


async def test_a_blocked_drafter_link_gets_few_long_commits_instead_of_many_short_ones():
    async with at_work() as stage:
        drafter = ToyDrafter("a", random_tree(1))
        drafter.gate.clear()
        stage.add_drafter(drafter)
        params = replace(GREEDY, max_tokens=400)
        await stage.ask(params=params)
        drafter.gate.set()
        await stage.settle()
        # The window of the link is 64 frames; what comes after waits as a name, not as frames.
        assert len(drafter.frames) <= 64 + 4
        assert drafter.contexts == {}


async def test_a_drafter_that_dies_and_returns_costs_only_speed():
    async with at_work(breaker_failures=10) as stage:
        params = replace(SEEDED, max_tokens=120)
        running = stage.begin(params=params)
        for life in range(4):
            link = stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(life)))
            await stage.settle(12)
            link.sever()
            await stage.settle(6)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(9)))
        events = await running
        assert events[-1].stats.num_accepted_draft_tokens > 0


async def test_a_target_that_forgets_a_text_is_sent_all_of_it_again():
    params = replace(SEEDED, max_tokens=200)
    toy = ToyTarget()
    async with at_work(toy, ToyDrafter("a", oracle_in_a_crowd(2))) as stage:
        running = stage.begin(params=params)
        for life in range(1, 4):
            await toy.wait_for_steps(len(toy.steps) + 5)
            toy.forget("r")
            await stage.settle()
            assert not running.done()
            assert toy.contexts == {}
            await stage.pass_time(1.0)
            opens = toy.opens
            assert len(opens) == life + 1
            assert len(opens[-1].token_ids) > len(opens[-2].token_ids)
        await running
        assert "drafthouse_failovers_total 0.0" in stage.metrics()


async def test_another_target_takes_over_in_mid_text():
    async with house() as stage:
        first, second = ToyTarget(), ToyTarget()
        link = stage.add_target(first, "one")
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(2)))
        params = replace(SEEDED, max_tokens=200)
        running = stage.begin(params=params)
        await first.wait_for_steps(5)
        stage.add_target(second, "two")
        link.sever()
        await running
        assert second.steps
        assert "drafthouse_failovers_total 1.0" in stage.metrics()


async def test_merged_drafters_do_not_change_the_text_and_save_steps():
    target = ToyTarget()
    async with at_work(
        target, ToyDrafter("a", random_tree(5)), ToyDrafter("b", oracle_in_a_crowd(6))
    ) as stage:
        await stage.ask(params=SEEDED)
    assert len(target.steps) < SEEDED.max_tokens


async def test_many_requests_at_once_each_get_their_own_text():
    async with at_work(ToyDrafter("a", oracle_in_a_crowd(7))) as stage:
        prompts = [[i, i + 1, (i * 7) % 32] for i in range(12)]
        params = [replace(SEEDED if i % 2 else GREEDY, max_tokens=20 + i) for i in range(12)]
        await asyncio.gather(
            *(
                stage.ask(p, s, id=f"r{i}", task="code" if i % 3 else "chat")
                for i, (p, s) in enumerate(zip(prompts, params, strict=True))
            )
        )
