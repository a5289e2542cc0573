"""What is said of targets and items that are not heard of: asked again, left, or waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from cluster.core import SamplingParams, VerifyItem
from cluster.errors import WorkerError
from cluster.messages import InHand, VerdictFrame, VerifyFrame
from cluster.rpc.link import Link
from cluster.rpc.memory import memory_pair
from tests.support.coordinator.house import GREEDY, SEEDED, House, collect, house, request, text_of
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    oracle_in_a_crowd,
    plain_text,
    target_description,
)
from tests.support.rpc.faulty import FaultPlan, FaultyLink

LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
SHORT = replace(GREEDY, max_tokens=1)
PROMPT = [1, 2, 3]


def add_faulty_target(stage: House, toy: ToyTarget, there: FaultPlan, back: FaultPlan) -> None:
    ours, theirs = memory_pair()
    stage.tasks.append(asyncio.create_task(toy.serve(FaultyLink(theirs, back))))
    stage.coordinator.add_target("target-0", target_description(), FaultyLink(ours, there))


async def keep_talking(stage: House, seconds: int) -> None:
    """Every second another request comes and is answered: the target never falls silent."""
    for number in range(seconds):
        asked = request([number % 32], SHORT, id=f"short-{number}")
        events = await collect(stage.coordinator, asked)
        assert text_of(events) == plain_text([number % 32], SHORT)
        await stage.pass_time(1.0)


def items_of(toy: ToyTarget, request_id: str) -> list[VerifyItem]:
    return [item for frame in toy.frames for item in frame.items if item.request_id == request_id]


def target_ids(stage: House) -> list[object]:
    return [target["id"] for target in stage.coordinator.status()["targets"]]


@LAWS
@pytest.mark.parametrize("direction", ["item", "answer"])
@pytest.mark.parametrize("number", [0, 4], ids=["prefill", "decode"])
async def test_one_lost_frame_costs_a_pause_and_not_the_request(
    params: SamplingParams, direction: str, number: int
) -> None:
    lost, sound = FaultPlan(0, lost=frozenset([number])), FaultPlan(0)
    plans = (lost, sound) if direction == "item" else (sound, lost)
    async with house(target_silence_s=6.0) as stage:
        toy = ToyTarget()
        add_faulty_target(stage, toy, *plans)
        stage.add_drafter(ToyDrafter("a", oracle_in_a_crowd(1)))
        running = asyncio.create_task(collect(stage.coordinator, request(params=params)))
        await stage.settle()
        await keep_talking(stage, 5)
        assert not running.done()
        await keep_talking(stage, 2)
        assert text_of(await running) == plain_text(PROMPT, params)
        assert target_ids(stage) == ["target-0"]
        # It went on where it was: a new generation would have been a failover.
        assert len({item.generation for item in items_of(toy, "r")}) == 1


@dataclass
class Deaf(ToyTarget):
    """Never answers for the request "r", and answers all others."""

    def answer(self, frame: VerifyFrame) -> VerdictFrame:
        items = tuple(item for item in frame.items if item.request_id != "r")
        return super().answer(replace(frame, items=items))


async def test_an_item_that_is_not_answered_twice_leaves_its_target_alone_of_all() -> None:
    async with house(drafters=(), target_silence_s=6.0) as stage:
        deaf, other = Deaf(), ToyTarget()
        stage.add_target(deaf, "deaf")
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await stage.settle()
        await keep_talking(stage, 5)
        assert len(items_of(deaf, "r")) == 1
        await keep_talking(stage, 2)
        assert len(items_of(deaf, "r")) == 2
        stage.add_target(other, "other")
        await stage.pass_time(4.0)
        assert other.frames == []
        await stage.pass_time(2.0)
        assert text_of(await running) == plain_text(PROMPT, GREEDY)
        assert target_ids(stage) == ["deaf", "other"]
        assert "r" in {name for frame in deaf.frames for name in frame.released}


async def test_a_request_that_no_target_ever_answers_ends_in_an_error() -> None:
    async with house(drafters=(), target_silence_s=2.0, target_timeout_s=1000.0) as stage:
        stage.add_target(Deaf())
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await stage.settle()
        await keep_talking(stage, 20)
        events = await running
    assert events[-1].error_code == WorkerError.code


@dataclass
class Working(ToyTarget):
    """Answers when its gate opens, and names what it has in hand when it is told to."""

    links: list[Link[VerdictFrame, VerifyFrame]] = field(default_factory=list)

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        self.links.append(link)
        await super().serve(link)

    async def say(self) -> None:
        items = [item for frame in self.frames for item in frame.items]
        in_hand = tuple(InHand(item.request_id, item.generation) for item in items)
        await self.links[-1].send(VerdictFrame(in_hand=in_hand))


async def test_a_target_that_works_for_long_is_neither_asked_again_nor_left() -> None:
    async with house(drafters=(), target_silence_s=6.0, target_timeout_s=120.0) as stage:
        toy = Working()
        toy.gate.clear()
        stage.add_target(toy)
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await toy.wait_for_frames(1)
        for _ in range(110):
            await toy.say()
            await stage.pass_time(1.0)
        assert len(toy.frames) == 1
        toy.gate.set()
        assert text_of(await running) == plain_text(PROMPT, GREEDY)


async def test_a_target_that_says_it_works_and_ends_no_step_is_left_in_the_end() -> None:
    async with house(drafters=(), target_silence_s=6.0, target_timeout_s=120.0) as stage:
        toy = Working()
        toy.gate.clear()
        stage.add_target(toy, "hung")
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await toy.wait_for_frames(1)
        stage.add_target(ToyTarget(), "other")
        for _ in range(120):
            await toy.say()
            await stage.pass_time(1.0)
        assert text_of(await running) == plain_text(PROMPT, GREEDY)
        assert target_ids(stage) == ["other"]


async def test_a_silent_target_is_left_after_the_configured_time_and_its_requests_move() -> None:
    async with house(target_silence_s=6.0) as stage:
        silent, other = ToyTarget(), ToyTarget()
        silent.gate.clear()
        stage.add_target(silent, "silent")
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await silent.wait_for_frames(1)
        stage.add_target(other, "other")
        await stage.pass_time(5.5)
        assert other.frames == []
        await stage.pass_time(0.5)
        assert text_of(await running) == plain_text(PROMPT, GREEDY)


async def test_an_idle_target_is_not_taken_for_a_silent_one() -> None:
    async with house(target_silence_s=6.0) as stage:
        stage.add_target(ToyTarget())
        await stage.pass_time(100.0)
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await stage.settle(3)
        stage.coordinator.tick()
        assert target_ids(stage) == ["target-0"]
        assert text_of(await running) == plain_text(PROMPT, GREEDY)


async def test_time_in_which_the_coordinator_was_stopped_itself_is_nobodys_silence() -> None:
    async with house(target_silence_s=6.0) as stage:
        toy = ToyTarget()
        toy.gate.clear()
        stage.add_target(toy)
        running = asyncio.create_task(collect(stage.coordinator, request()))
        await toy.wait_for_frames(1)
        await stage.pass_time(1.0)
        stage.clock.now += 3600.0
        stage.coordinator.tick()
        assert target_ids(stage) == ["target-0"]
        toy.gate.set()
        assert text_of(await running) == plain_text(PROMPT, GREEDY)
