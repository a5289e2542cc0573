"""What an answer says of its drafts: whose they were, and why there were none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core import SpeculationOptions, SpeculationStats, TokenEvent
from cluster.errors import ProtocolError
from cluster.rpc.memory import memory_pair
from tests.support.coordinator.house import GREEDY, House, collect, house, request, text_of
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    drafter_description,
    oracle_chain,
    plain_text,
    random_tree,
)

TOLD = SpeculationOptions(return_draft_sources=True)


async def served(stage: House, **fields: Any) -> tuple[list[TokenEvent], SpeculationStats]:
    events = await collect(stage.coordinator, request(**fields))
    stats = events[-1].stats
    assert stats is not None
    return events, stats


async def test_every_token_names_the_drafters_that_had_proposed_it() -> None:
    async with house(["right", "half", "wrong"]) as stage:
        stage.add_target(ToyTarget())
        stage.add_drafter(ToyDrafter("right", oracle_chain(4)))
        stage.add_drafter(ToyDrafter("half", oracle_chain(2)))
        stage.add_drafter(ToyDrafter("wrong", random_tree(1, 3)))
        events, stats = await served(stage, speculation=TOLD)
    sources = [drafters for event in events for drafters in event.draft_sources]
    assert text_of(events) == plain_text([1, 2, 3], GREEDY)
    assert len(sources) == len(text_of(events))
    assert sources[0] == ()  # drawn from the prompt, before any draft
    assert stats.accepted_by_drafter["right"] >= stats.accepted_by_drafter["half"] > 0
    assert stats.idle_because == ""
    # Where a stop or the end of the text cuts a path, more was accepted than emitted.
    for name, count in stats.accepted_by_drafter.items():
        told = sum(name in drafters for drafters in sources)
        assert told <= count <= told + 4
    assert any(set(drafters) >= {"right", "half"} for drafters in sources)


async def test_sources_are_told_to_those_who_ask_only() -> None:
    async with house(["a"]) as stage:
        stage.add_target(ToyTarget())
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        events, stats = await served(stage)
    assert not any(event.draft_sources for event in events)
    assert stats.accepted_by_drafter == {"a": stats.num_accepted_draft_tokens}


@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationOptions(enabled=False),
        SpeculationOptions(max_draft_tokens=0),
        SpeculationOptions(drafters=()),
    ],
)
async def test_a_request_without_drafts_by_its_own_wish_says_so(
    speculation: SpeculationOptions,
) -> None:
    async with house(["a"]) as stage:
        stage.add_target(ToyTarget())
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        _, stats = await served(stage, speculation=speculation)
    assert (stats.num_spec_steps, stats.idle_because) == (0, "disabled")


async def test_a_drafter_that_never_came_is_loading_and_one_that_went_is_down() -> None:
    async with house(["a"]) as stage:
        stage.add_target(ToyTarget())
        _, stats = await served(stage)
        assert stats.idle_because == "warming_up"
        link = stage.add_drafter(ToyDrafter("a", oracle_chain()))
        _, stats = await served(stage)
        assert stats.idle_because == ""
        await link.close()
        await stage.settle()
        _, stats = await served(stage)
    assert stats.idle_because == "drafters_down"


async def test_a_refused_drafter_is_none_for_the_model_until_another_comes() -> None:
    async with house(["a"]) as stage:
        stage.add_target(ToyTarget())
        stranger = replace(drafter_description("a"), tokenizer_hash="another")
        with pytest.raises(ProtocolError):
            stage.coordinator.add_drafter("a", "r0", stranger, memory_pair()[0])
        _, stats = await served(stage)
        assert stats.idle_because == "no_drafter_for_model"
        stage.add_drafter(ToyDrafter("a", oracle_chain()))
        _, stats = await served(stage)
        assert stats.idle_because == ""


async def test_without_any_configured_there_is_none_for_the_model() -> None:
    async with house([]) as stage:
        stage.add_target(ToyTarget())
        _, stats = await served(stage)
    assert stats.idle_because == "no_drafter_for_model"


async def test_drafters_that_have_nothing_to_say_are_warming_up() -> None:
    async with house(["a"]) as stage:
        stage.add_target(ToyTarget())
        silent = ToyDrafter("a", oracle_chain())
        silent.gate.clear()
        stage.add_drafter(silent)
        _, stats = await served(stage)
    assert stats.idle_because == "warming_up"


async def test_the_last_event_says_how_long_the_request_queued() -> None:
    async with house(["a"]) as stage:
        stage.clock.now += 1.0
        events: list[TokenEvent] = []
        stage.coordinator.open("r", request(), events.append)
        stage.clock.now += 3.0
        stage.add_target(ToyTarget())
        await stage.settle()
    assert events[-1].finish_reason is not None
    assert [event.queue_time_s for event in events] == [0.0] * (len(events) - 1) + [3.0]
