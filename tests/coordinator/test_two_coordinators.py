"""Any number of coordinators at one target: each gets its own texts, and a share of the places."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.core import SamplingParams
from cluster.errors import CapacityError
from cluster.rpc.link import Link
from cluster.rpc.messages import ProposalFrame
from tests.support.coordinator.house import GREEDY, SEEDED, House, at_work, house, text_of
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_in_a_crowd,
    random_tree,
)


@dataclass
class Pair:
    """Two coordinators at one target, and their links to it."""

    first: House
    second: House
    links: Sequence[Link[Any, Any]]


@asynccontextmanager
async def pair(
    target: ToyTarget, settings: Mapping[str, int] = {}, **limits: int
) -> AsyncIterator[Pair]:
    """settings: of the coordinators.  limits: of the target.  What runs at the end is cancelled."""
    given = {"replicas": 2, **settings}
    async with house(**given) as first, house(**given) as second:
        yield Pair(first, second, [each.add_target(target, **limits) for each in (first, second)])


async def texts_of(
    stage: House, num_texts: int, params: SamplingParams, *, first: int = 0
) -> list[list[int]]:
    """Of so many requests with ids that the other coordinator uses as well; `begin` checks them."""
    running = [stage.begin([first + i, 2, 3], params, id=f"r{i}") for i in range(num_texts)]
    await stage.finish(*running)
    return [text_of(each.result()) for each in running]


@pytest.mark.usefixtures("budget")
async def test_both_get_the_right_texts_out_of_common_steps():
    target = ToyTarget()
    async with pair(target) as both:
        both.first.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
        both.second.add_drafter(ToyDrafter("b", random_tree(2)))
        await asyncio.gather(
            texts_of(both.first, 4, GREEDY), texts_of(both.second, 4, SEEDED, first=9)
        )
        await both.first.settle()
        assert target.contexts == {}
    assert max(len(items) for items in target.steps) == 8


async def test_each_has_a_share_of_the_places_and_all_texts_end():
    target, most = ToyTarget(), {}

    def noted(frame: Any) -> Any:
        for stream in target.streams:
            count = len(target.texts.of(stream))
            most[stream.prefix] = max(most.get(stream.prefix, 0), count)
        return frame

    target.says = noted
    async with pair(target, max_running_sequences=4) as both:
        await asyncio.gather(
            texts_of(both.first, 9, GREEDY), texts_of(both.second, 9, GREEDY, first=9)
        )
        assert list(most.values()) == [2, 2]
        both.links[1].sever()
        await both.first.pass_time(2.0)
        await texts_of(both.first, 9, GREEDY)
        assert list(most.values()) == [4, 2]


async def test_one_that_is_lost_takes_its_own_texts_along_and_no_others():
    target = ToyTarget()
    async with pair(target) as both:
        lost = both.second.begin(params=replace(GREEDY, max_tokens=4000))
        await target.wait_for_steps(3)
        running = asyncio.create_task(texts_of(both.first, 3, GREEDY))
        await target.wait_for_steps(8)
        both.links[1].sever()
        await both.first.settle()
        assert {text.stream.prefix for text in target.texts.values()} <= {"1/"}
        await running
        assert both.second.value("drafthouse_queued_requests") == 1
        assert not lost.done()


async def test_the_targets_own_metrics_go_to_one_of_them_and_then_to_the_next():
    def gauge(stage: House) -> bool:
        metrics = stage.metrics()
        return 'drafthouse_speculation_deficit_seconds{process="target-0"' in metrics

    async with pair(ToyTarget()) as both:
        await both.first.pass_time(2.0)
        await both.second.settle()
        assert (gauge(both.first), gauge(both.second)) == (True, False)
        both.links[0].sever()
        await both.first.settle()
        await both.second.pass_time(2.0)
        assert (gauge(both.first), gauge(both.second)) == (False, True)


async def test_a_step_with_texts_of_both_counts_once():
    target = ToyTarget()
    async with pair(target) as both:
        texts = await asyncio.gather(
            texts_of(both.first, 3, GREEDY), texts_of(both.second, 3, GREEDY, first=9)
        )
        await both.first.settle()
        houses = (both.first, both.second)
        for series, expected in {
            "drafthouse_target_steps_total": len(target.steps),
            "drafthouse_target_step_seconds_count": len(target.steps),
            "drafthouse_batch_size_sum": sum(map(len, target.steps)),
            "vllm:iteration_tokens_total_sum": sum(
                3 + len(text) for found in texts for text in found
            ),
            "drafthouse_time_to_first_token_seconds_count": 6,
        }.items():
            assert sum(each.value(series) for each in houses) == expected, series


async def test_queue_and_places_are_shared_and_one_that_is_left_alone_has_all():
    target = ToyTarget()
    limits = {"max_running_sequences": 4, "max_queued_requests": 6}
    async with pair(target, settings=limits, max_running_sequences=64) as both:
        await both.first.settle()
        target.gate.clear()

        async def taken(stage: House, name: str) -> int:
            """Ask until one is sent away; returns how many are not."""
            for number in itertools.count():
                running.append(stage.begin(id=f"{name}{number}"))
                await stage.settle(5)
                if running[-1].done():
                    with pytest.raises(CapacityError):
                        await running.pop()
                    return number
            raise AssertionError

        running = []
        assert await taken(both.first, "first") == 2 + 3
        assert await taken(both.second, "second") == 2 + 3
        both.links[1].sever()
        await both.first.settle()
        assert await taken(both.first, "more") == 2 + 3


async def test_a_target_that_steps_for_another_is_not_taken_for_stuck():
    """The second text waits for pages; the coordinator that waits counts none of the steps."""
    target = ToyTarget(waits=lambda name: name.startswith("2/"))
    async with pair(target, settings={"target_timeout_s": 20}) as both:
        waiting = both.second.begin()
        running = both.first.begin(params=replace(GREEDY, max_tokens=4000))
        for _ in range(30):
            await both.first.pass_time(1.0)
            await both.second.pass_time(1.0)
        assert [each["sessions"] for each in both.second.status()["targets"]] == [1]
        assert not running.done()
        target.waits = lambda name: False
        await waiting


async def test_a_drafter_has_the_room_that_it_says_whoever_fills_it():
    async with house() as stage:
        stage.add_drafter(ToyDrafter("a", random_tree(1)), max_running_sequences=3)
        (replica,) = stage.coordinator._pool
        assert (replica.has_room(), replica.num_held) == (True, 0)
        replica.note_held(ProposalFrame(num_requests=3))
        assert (replica.has_room(), replica.num_held) == (False, 3)
        replica.note_held(ProposalFrame(num_requests=2))
        assert replica.has_room()


LONG = replace(GREEDY, max_tokens=200)


@pytest.mark.parametrize("acknowledged", [0, 2**63])
async def test_a_text_runs_no_further_ahead_than_its_coordinator_has_heard(
    acknowledged: int,
):
    """To say of more than was sent that it came counts for what was sent."""
    target = ToyTarget()
    target.hears = lambda frame: replace(frame, acknowledged=acknowledged if frame.opens else 0)
    async with at_work(target, drafters=()) as stage:
        running = stage.begin(params=LONG)
        await stage.settle(4000)
        assert 60 <= len(target.steps) <= 70
        parked_at = len(target.steps)
        await stage.pass_time(5.0)
        assert len(target.steps) == parked_at
        assert [text.opened.request_id for text in target.texts.values()] == ["r"]
        target.hears = lambda frame: frame
        await stage.pass_time(2.0)
        await stage.settle(4000)
        await running
        (opened,) = target.opens
        assert opened.params == LONG
