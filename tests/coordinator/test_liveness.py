"""What is said of targets and texts that are not heard of: begun anew, left, or waited for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.coordinator.session import MAX_LOST_IN_A_ROW
from cluster.errors import WorkerError
from cluster.rpc.messages import StepFrame, VerdictFrame
from tests.support.coordinator.house import GREEDY, SEEDED, at_work, house
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_in_a_crowd

PROMPT = [1, 2, 3]


def losing(is_lost: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Of the frames of a direction, the first like that is lost."""
    lost = []

    def passed(frame: Any) -> Any:
        if lost or not is_lost(frame):
            return frame
        lost.append(frame)
        return None

    return passed


@pytest.mark.parametrize(
    ("is_lost", "is_seen"),
    [
        (lambda frame: frame.verdicts, True),
        (lambda frame: any(each.context_len > len(PROMPT) + 5 for each in frame.verdicts), True),
        (lambda frame: any(each.finish_reason for each in frame.verdicts), False),
    ],
)
async def test_a_lost_verdict_costs_a_moment_and_not_the_request(
    is_lost: Callable[[VerdictFrame], bool], is_seen: bool
):
    toy = ToyTarget(says=losing(is_lost))
    async with at_work(toy, ToyDrafter("a", oracle_in_a_crowd(1))) as stage:
        running = stage.begin(params=SEEDED)
        await stage.settle(1500)
        # A gap is seen by the verdict that follows; for the last one it takes a heartbeat.
        assert running.done() is is_seen
        await stage.pass_time(2.0)
        await running
        first, again = toy.opens
        assert again.generation > first.generation
        assert again.token_ids[: len(PROMPT)].tolist() == PROMPT
        assert stage.target_ids() == ["target-0"]
        assert "drafthouse_failovers_total 0.0" in stage.metrics()
        assert toy.contexts == {}


async def test_a_text_that_never_came_is_sent_again_after_a_heartbeat():
    toy = ToyTarget(hears=losing(lambda frame: bool(frame.opens)))
    async with at_work(toy) as stage:
        running = stage.begin()
        await stage.settle(500)
        assert not toy.steps
        await stage.pass_time(3.0)
        await stage.settle(1500)
        assert len(toy.opens) == 1
        await running
        assert stage.target_ids() == ["target-0"]


async def test_a_text_on_its_way_is_not_missed_by_an_older_heartbeat():
    """A heartbeat is of what the engine had taken in, not of what has come."""
    toy = ToyTarget()
    async with at_work(toy) as stage:
        await stage.ask(id="before")
        toy.gate.clear()
        running = stage.begin()
        await stage.settle()
        assert len(toy.opens) == 2
        assert [text.id for text in toy.texts.values()] == []
        await stage.pass_time(5.0)
        toy.gate.set()
        await running
        assert len(toy.opens) == 2


async def test_a_text_whose_cancel_was_lost_is_freed_by_a_heartbeat():
    toy = ToyTarget(hears=losing(lambda frame: bool(frame.cancels)))
    async with at_work(toy) as stage:
        running = stage.begin(params=replace(GREEDY, max_tokens=4000))
        await toy.wait_for_steps(5)
        other = stage.begin(id="other")
        await toy.wait_for_steps(10)
        stage.coordinator.cancel("r")
        await running
        await toy.wait_for_steps(15)
        assert {text.opened.request_id for text in toy.texts.values()} == {"r", "other"}
        await stage.pass_time(2.0)
        assert "r" not in {text.opened.request_id for text in toy.texts.values()}
        await other
        await stage.settle(60)
        assert toy.contexts == {}


def deaf(frame: StepFrame) -> StepFrame:
    return replace(frame, opens=())


async def test_a_text_that_every_target_loses_ends_in_an_error():
    async with house(drafters=()) as stage:
        for name in ("one", "other"):
            stage.add_target(ToyTarget(hears=deaf), name)
        running = stage.begin(error=WorkerError.code)
        await stage.pass_time(100.0)
        await running
        assert stage.target_ids() == ["one", "other"]


async def test_a_text_that_one_target_loses_again_and_again_goes_to_another():
    async with house(drafters=()) as stage:
        other = ToyTarget()
        stage.add_target(ToyTarget(hears=deaf), "deaf")
        running = stage.begin()
        await stage.settle()
        stage.add_target(other, "other")
        await stage.pass_time(30.0)
        await running
        assert [each.generation for each in other.opens] == [2 + MAX_LOST_IN_A_ROW]
        assert stage.target_ids() == ["deaf", "other"]


@pytest.mark.parametrize(
    ("is_mute", "patience_s"), [(True, 6.0), (False, 120.0)], ids=["silent", "in one step"]
)
async def test_a_target_is_left_after_the_configured_time_and_its_requests_move(
    *, is_mute: bool, patience_s: float
):
    """The time of one that says it works, and ends no step, is another one."""
    async with house(drafters=(), target_silence_s=6.0, target_timeout_s=120.0) as stage:
        toy = ToyTarget(is_mute=is_mute, is_held=True)
        stage.add_target(toy, "hung")
        running = stage.begin()
        await toy.wait_for_frames(1)
        stage.add_target(ToyTarget(), "other")
        await stage.pass_time(patience_s - 0.5)
        assert stage.target_ids() == ["hung", "other"]
        assert len(toy.opens) == 1, "nor was it asked again"
        await stage.pass_time(0.5)
        await running
        assert stage.target_ids() == ["other"]


async def test_a_target_whose_steps_are_known_to_be_long_is_waited_for_longer():
    async with house(drafters=(), target_silence_s=6.0, target_timeout_s=60.0) as stage:
        slow = ToyTarget(is_held=True)
        stage.add_target(slow, "slow")
        first = stage.begin()
        await slow.wait_for_frames(1)
        await stage.pass_time(30.0)
        slow.gate.set()
        await first
        slow.gate.clear()
        num_frames = len(slow.frames)
        second = stage.begin()
        await slow.wait_for_frames(num_frames + 1)
        stage.add_target(ToyTarget(), "other")
        await stage.pass_time(100.0)
        assert stage.target_ids() == ["slow", "other"]
        await stage.pass_time(200.0)
        assert stage.target_ids() == ["other"]
        await second


async def test_an_idle_target_is_not_taken_for_a_silent_one():
    async with at_work(ToyTarget(is_mute=True), target_silence_s=6.0) as stage:
        await stage.pass_time(100.0)
        running = stage.begin()
        await stage.settle(3)
        stage.coordinator.tick()
        assert stage.target_ids() == ["target-0"]
        await running


async def test_time_in_which_the_coordinator_was_stopped_itself_is_nobodys_silence():
    toy = ToyTarget(is_mute=True, is_held=True)
    async with at_work(toy, target_silence_s=6.0) as stage:
        running = stage.begin()
        await toy.wait_for_frames(1)
        await stage.pass_time(1.0)
        stage.clock.now += 3600.0
        stage.coordinator.tick()
        assert stage.target_ids() == ["target-0"]
        toy.gate.set()
        await running
