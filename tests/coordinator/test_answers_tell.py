"""What an answer says of its drafts: whose they were, and why there were none."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cluster.core import FinishReason, SpeculationOptions, SpeculationStats, TokenEvent
from cluster.errors import RequestError
from tests.support.coordinator.house import GREEDY, SEEDED, House, at_work, house, request, text_of
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_chain,
    random_tree,
)

FEW = SpeculationOptions(max_draft_tokens=2)
TOLD = SpeculationOptions(return_draft_sources=True)


def several() -> list[ToyDrafter]:
    grows = {
        "silent": oracle_chain(0),
        "right": oracle_chain(4),
        "half": oracle_chain(2),
        "wrong": random_tree(1, 3),
    }
    return [ToyDrafter(name, grow) for name, grow in grows.items()]


async def served(stage: House, **fields: Any) -> tuple[list[TokenEvent], SpeculationStats]:
    events = await stage.ask(**fields)
    return events, events[-1].stats


async def test_every_token_names_the_drafters_that_had_proposed_it():
    async with at_work(*several()) as stage:
        events, stats = await served(stage, params=SEEDED, speculation=TOLD)
    sources = [drafters for event in events for drafters in event.draft_sources]
    assert len(sources) == len(text_of(events))
    assert sources[0] == ()  # drawn from the prompt, before any draft
    assert stats.idle_because == ""
    accepted, shared = Counter(stats.accepted_by_drafter), Counter(stats.shared_by_drafter)
    first = Counter(drafters[0] for drafters in sources if drafters)
    others = Counter(name for drafters in sources for name in drafters[1:])
    assert (first, others) == (accepted, shared)
    assert accepted.total() == stats.num_accepted_draft_tokens
    assert accepted["right"] + shared["right"] >= accepted["half"] + shared["half"] > 0
    assert any(set(drafters) >= {"right", "half"} for drafters in sources)


async def test_a_drafter_that_never_came_is_loading_for_a_while_and_one_that_went_is_down():
    other = SpeculationOptions(drafters=("b",), max_draft_tokens=1)
    async with at_work() as stage:
        assert (await served(stage))[1].idle_because == "warming_up"
        link = stage.add_drafter(ToyDrafter("a", oracle_chain()))
        assert (await served(stage))[1].idle_because == ""
        await link.close()
        await stage.settle()
        assert (await served(stage))[1].idle_because == "drafters_down"
        assert (await served(stage, speculation=other))[1].idle_because == "warming_up"
        stage.clock.now += 300.0
        assert (await served(stage, speculation=other))[1].idle_because == "drafters_down"


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_an_answer_without_room_for_a_draft_says_so(max_tokens: int):
    async with at_work(ToyDrafter("a", oracle_chain())) as stage:
        _, stats = await served(stage, params=replace(GREEDY, max_tokens=max_tokens))
        assert stage.value("drafthouse_bookkeeping_faults_total") == 0
    assert stats.idle_because == "too_short"


async def test_what_answers_and_the_metrics_count_is_the_same_and_adds_up():
    drafters = several()
    async with at_work(*drafters) as stage:
        fields = {"speculation": FEW, "segment": "s"}
        answers = [(await served(stage, id=f"r{index}", **fields))[1] for index in range(4)]
        await stage.settle()
    steps = sum(stats.num_spec_steps for stats in answers)
    drafted = sum(stats.num_draft_tokens for stats in answers)
    accepted = sum(stats.num_accepted_draft_tokens for stats in answers)
    accepted_total = "drafthouse_accepted_draft_tokens_total"
    per_position = "drafthouse_accepted_draft_tokens_per_pos_total"
    shared_total = "drafthouse_shared_accepted_tokens_total"
    assert stage.value("drafthouse_spec_steps_total") == steps > 0
    assert stage.value("drafthouse_draft_tokens_total", task="default") == drafted
    assert drafted >= accepted > 0
    for series, expected in (
        ("draft_tokens_total", drafted),
        ("accepted_draft_tokens_total", accepted),
        ("time_to_first_token_seconds_count", len(answers)),
    ):
        assert stage.value(f"drafthouse_segment_{series}", segment="s") == expected
    assert stage.value(accepted_total) == stage.value(per_position) == accepted
    first = sum(sum(stats.acceptance_histogram[1:]) for stats in answers)
    assert stage.value(per_position, position="0") == first
    for name in ("right", "half", "wrong"):
        own = sum(stats.accepted_by_drafter.get(name, 0) for stats in answers)
        shared = sum(stats.shared_by_drafter.get(name, 0) for stats in answers)
        assert stage.value(accepted_total, drafter=name) == own
        assert stage.value(shared_total, drafter=name) == shared
        assert 0 < stage.value("drafthouse_drafts_total", drafter=name) <= steps
    assert stage.value(shared_total) > 0
    for each in drafters:
        told = [
            stage.value(f"drafthouse_{what}_total", drafter=each.name)
            for what in ("drafter_commits", "draft_demand_nodes", "draft_seconds")
        ]
        num_commits = len(each.commits)
        assert told == [num_commits, 64 * num_commits, 0.25 * len(each.frames)]
    for name, outcome in (("right", "hit"), ("silent", "miss")):
        for labels in ({}, {"outcome": outcome}):
            later = stage.value("drafthouse_pre_drafted_steps_total", drafter=name, **labels)
            assert later == num_commits - len(answers)


@pytest.mark.parametrize("error", [None, RequestError("no")], ids=["written", "refused"])
async def test_the_last_event_says_how_long_the_request_queued(error: RequestError | None):
    async with house(["a"]) as stage:
        stage.clock.now += 1.0
        events = []
        stage.coordinator._table.open("r", request(), events.append)
        stage.clock.now += 3.0
        stage.add_target(ToyTarget(refuses=lambda item: error))
        await stage.settle()
    assert events[-1].finish_reason is not None
    assert (events[-1].finish_reason is FinishReason.ERROR) == (error is not None)
    *before, last = ((event.stats is not None, event.queue_time_s) for event in events)
    assert (set(before), last) == ({(False, 0.0)} if error is None else set(), (True, 3.0))
    assert events[-1].prefill_time_s == 0.0, "the clock stood still"
