"""How texts end, what is counted on the way, and what is freed."""

import asyncio
from dataclasses import replace

import pytest

from cluster.core import FinishReason, SpeculationOptions
from cluster.errors import DrafthouseError, RequestError, WorkerError
from tests.support.coordinator.house import (
    GREEDY,
    SEEDED,
    at_work,
    house,
    request,
    text_of,
)
from tests.support.coordinator.toy_target import Item
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    oracle_in_a_crowd,
)


async def test_the_context_limit_ends_a_text():
    async with house() as stage:
        stage.add_target(ToyTarget(), max_context_len=20)
        stage.add_drafter(ToyDrafter("a", oracle_chain(7)))
        events = await stage.ask()
    assert len(text_of(events)) == 17
    assert events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stops", [False, True])
async def test_cancelling_frees_target_and_drafters_within_one_round(*, stops: bool):
    """stops: the coordinator cancels all that runs."""
    target, drafter = ToyTarget(), ToyDrafter("a", oracle_in_a_crowd(1))
    async with at_work(target, drafter) as stage:
        running = stage.begin(params=replace(GREEDY, max_tokens=4000))
        await target.wait_for_steps(10)
        if stops:
            await stage.coordinator.stop()
        else:
            stage.coordinator.cancel("r")
        events = await running
        await stage.settle(60)
        assert events[-1].finish_reason is FinishReason.CANCELLED
        assert events[-1].stats is not None
        assert target.contexts == {}
        assert drafter.contexts == {}
        assert stage.status()["num_running"] == 0


async def test_stopping_waits_for_the_link_of_a_target_that_was_just_left():
    async with at_work(ToyTarget()) as stage:
        leading = stage.seat.leading
        stage.coordinator.remove_target(stage.seat.id)
        await stage.coordinator.stop()
        assert leading.done()


async def test_leaving_the_stream_early_cancels_the_request():
    target = ToyTarget()
    async with at_work(target) as stage:
        events = stage.coordinator.submit(request(params=replace(GREEDY, max_tokens=4000)))
        await anext(events)
        await events.aclose()
        await stage.settle(60)
        assert target.contexts == {}


async def test_statistics_follow_the_definitions():
    target = ToyTarget()
    async with at_work(target, ToyDrafter("a", oracle_in_a_crowd(4))) as stage:
        events = await stage.ask(params=SEEDED)
    stats = events[-1].stats
    trees = [len(item.tree) for item in target.items]
    assert stats.num_steps == len(events) == len(trees)
    assert not any(event.draft_sources for event in events), "nobody has asked for them"
    assert stats.num_draft_tokens == sum(trees)
    assert stats.num_spec_steps == sum(1 for size in trees if size)
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps
    accepted = sum(k * count for k, count in enumerate(stats.acceptance_histogram))
    assert stats.num_accepted_draft_tokens == accepted
    assert len(text_of(events)) == stats.num_steps + accepted
    assert stats.num_spec_tokens == len(stats.acceptance_histogram) - 1 > 0


@pytest.mark.parametrize(
    "options",
    [
        SpeculationOptions(enabled=False),
        SpeculationOptions(max_draft_tokens=0),
        SpeculationOptions(drafters=()),
    ],
)
async def test_a_request_without_speculation_is_not_drafted_for(
    options: SpeculationOptions,
):
    drafter = ToyDrafter("a", oracle_chain())
    async with at_work(drafter) as stage:
        events = await stage.ask(speculation=options)
    assert drafter.frames == []
    assert events[-1].stats.idle_because == "disabled"


async def test_a_request_may_bound_its_drafts_and_choose_its_drafters():
    target = ToyTarget()
    chosen, other = ToyDrafter("b", oracle_in_a_crowd(1)), ToyDrafter("a", oracle_chain())
    options = SpeculationOptions(max_draft_tokens=2, drafters=("b",))
    async with at_work(target, chosen, other) as stage:
        await stage.ask(speculation=options)
    assert other.frames == []
    sizes = {len(item.tree) for item in target.items}
    assert max(sizes) == 2


def refuse(error: type[DrafthouseError], times: int) -> ToyTarget:
    left = [times]

    def refuses(item: Item) -> DrafthouseError | None:
        if item.context_len < 10 or left[0] == 0:
            return None
        left[0] -= 1
        return error("because")

    return ToyTarget(refuses=refuses)


async def test_a_refused_request_ends_with_the_targets_error():
    async with at_work(refuse(RequestError, 1), drafters=()) as stage:
        events = await stage.ask(error=RequestError.code)
    assert events[-1].error_message == "because"


async def test_worker_errors_are_tried_again_a_few_times_and_then_reported():
    async with at_work(refuse(WorkerError, 3)) as stage:
        await stage.ask()
    async with at_work(refuse(WorkerError, 4)) as stage:
        await stage.ask(error=WorkerError.code)


async def test_a_target_that_never_keeps_anything_ends_in_an_error_not_in_a_loop():
    amnesiac = ToyTarget(keeps=lambda name: False)
    async with at_work(amnesiac) as stage:
        await stage.ask(error=WorkerError.code)
    assert len(amnesiac.steps) < 100


def short_of_pages() -> ToyTarget:
    """Cannot run "waiting" beyond its prefill while it runs another request."""
    target = ToyTarget()

    def waits(name: str) -> bool:
        return name.endswith("/waiting") and name in target.contexts and len(target.contexts) > 1

    target.waits = waits
    return target


@pytest.mark.parametrize("others", [["early", "late"], ["late"]])
async def test_a_text_that_waits_for_pages_does_not_hold_up_those_that_hold_them(
    others: list[str],
):
    target = short_of_pages()
    async with at_work(target, drafters=()) as stage:
        done = []

        async def run(name: str) -> None:
            await stage.ask(id=name)
            done.append(name)

        running = [asyncio.create_task(run(name)) for name in ("waiting", *others[:-1])]
        await target.wait_for_steps(6)
        running.append(asyncio.create_task(run(others[-1])))
        await asyncio.gather(*running)
    assert done == [*others, "waiting"]
    opened = [each.request_id for each in target.opens]
    assert sorted(opened) == sorted(done), "nothing was refused on the way"
