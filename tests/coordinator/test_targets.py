"""What a target is told, and when; where a text ends."""

import asyncio

import numpy as np
import pytest

from cluster.coordinator.session import Session
from cluster.coordinator.target_links import problem_of
from cluster.coordinator.targets import TargetSeat
from cluster.core import FinishReason, SamplingParams, TokenTree, token_array
from cluster.errors import CapacityError
from cluster.plan.texts import NO_SOURCES
from cluster.requests.fields import Redraw
from cluster.rpc.link import memory_pair
from cluster.rpc.messages import (
    Load,
    PoolTree,
    Refusal,
    StepFrame,
    TextName,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from tests.support.coordinator.house import at_work, request, session
from tests.support.coordinator.toys import ToyTarget


class Target:
    """The other end of a seat."""

    def __init__(self, max_frame_tokens: int = 1000) -> None:
        ours, self.link = memory_pair()
        description = WorkerDescription("t", "target", "t", vocab_size=8, max_running_sequences=3)
        self.seat = TargetSeat("t", description, ours, max_frame_tokens, 16)

    async def told(self) -> list[StepFrame]:
        """What is sent now."""
        await self.seat.flush()
        frames = []
        while True:
            try:
                async with asyncio.timeout(0.0):
                    frames.append(await anext(self.link))
            except TimeoutError:
                return frames


def named(name: str, num_tokens: int = 3) -> Session:
    return session([1] * num_tokens, SamplingParams(max_tokens=9), id=name)


def tree(name: str, base_len: int = 3) -> PoolTree:
    drafts, bits = TokenTree.chain([1, 2]), np.array([1, 1], np.uint32)
    return PoolTree(name, 0, base_len, 0, drafts, np.array([0.5, 0.25], np.float32), bits)


async def test_long_texts_go_in_frames_of_their_own():
    target = Target(max_frame_tokens=10)
    for name, num_tokens in (("a", 4), ("b", 4), ("c", 4), ("long", 30), ("d", 1)):
        target.seat.open(named(name, num_tokens))
    frames = await target.told()
    assert [[opened.request_id for opened in frame.opens] for frame in frames] == [
        ["a", "b"],
        ["c"],
        ["long"],
        ["d"],
    ]
    assert [frame.serial for frame in frames] == [1, 2, 3, 4]
    serials = [each.opened_serial for each in target.seat.sessions.values()]
    assert serials == [1, 1, 2, 3, 4]


async def test_a_text_that_is_dropped_before_it_was_sent_is_not_opened():
    target = Target()
    one, other = named("one"), named("other")
    target.seat.open(one)
    target.seat.open(other)
    target.seat.drop(one)
    (frame,) = await target.told()
    assert [opened.request_id for opened in frame.opens] == ["other"]
    assert frame.cancels == (TextName("one", 0),)


async def test_the_newest_tree_of_a_text_that_runs_is_sent():
    target = Target()
    running = named("running")
    target.seat.open(running)
    target.seat.tell(tree("running"))  # it is told with the text, or later
    target.seat.tell(tree("unknown"))
    (frame,) = await target.told()
    assert frame.trees == ()
    older, newer = tree("running", 4), tree("running", 5)
    target.seat.tell(older)
    target.seat.tell(newer)
    (frame,) = await target.told()
    assert frame.trees == (newer,)
    target.seat.tell(older)
    target.seat.open(running)  # it begins anew, and nothing is behind it
    (frame,) = await target.told()
    assert (len(frame.opens), frame.trees) == (1, ())
    target.seat.tell(older)
    target.seat.ended(running)
    assert await target.told() == []


async def test_what_came_is_acknowledged_long_before_the_target_parks_its_texts():
    target = Target()
    for serial in range(1, 16):
        target.seat.heard(VerdictFrame(serial=serial))
    assert await target.told() == []
    target.seat.heard(VerdictFrame(serial=16))
    target.seat.heard(VerdictFrame(serial=9))
    (frame,) = await target.told()
    assert frame.acknowledged == 16
    assert await target.told() == []
    target.seat.open(named("any frame says it"))
    target.seat.heard(VerdictFrame(serial=17))
    assert [frame.acknowledged for frame in await target.told()] == [17]


async def test_a_heartbeat_names_the_texts_once_all_of_them_were_sent():
    target = Target(max_frame_tokens=4)
    for name in ("a", "b"):
        target.seat.open(named(name))
    target.seat.heard(VerdictFrame(serial=3))
    target.seat.beat(is_plain=False)
    first, second = await target.told()
    assert first.heartbeat is None
    assert second.heartbeat.texts == (TextName("a", 0), TextName("b", 0))
    assert second.heartbeat.heard == 3
    assert await target.told() == []


async def test_a_target_has_the_room_that_it_says():
    seat = Target().seat
    seat.note_load(Load(seats=2))
    seat.open(named("a"))
    assert (seat.has_room(), seat.num_free) == (True, 2)
    seat.open(named("b"))
    assert (seat.has_room(), seat.num_free) == (False, 1)
    seat.note_load(Load(seats=99, num_running=3, num_waiting=9))  # no more than there are
    assert (seat.has_room(), seat.num_free) == (True, 0)
    seat.is_full = True
    assert not seat.has_room()
    seat.note_load(Load(seats=3))
    assert (seat.has_room(), seat.num_free) == (True, 1)


# Where a text ends, and what is believed of it.


def resumed(max_tokens: int = 9) -> Session:
    return session([5, 6], SamplingParams(max_tokens=max_tokens), output_ids=token_array([7]))


@pytest.mark.parametrize(
    ("max_tokens", "max_context_len", "remaining"),
    [(9, 0, 8), (9, 11, 8), (9, 10, 7), (9, 2, -1), (1, 100, 0)],
)
def test_a_text_ends_by_max_tokens_or_by_the_context_limit(
    max_tokens: int, max_context_len: int, remaining: int
):
    text = resumed(max_tokens)
    text.limit(max_context_len)
    assert text.remaining == remaining


def test_where_a_text_ends_is_fixed_once_it_has_a_place():
    text = resumed()
    for generation, max_context_len in ((0, 0), (0, 8), (1, 5), (2, 100)):
        text.generation = generation
        text.limit(max_context_len)
    assert text.opened().max_len == 8


@pytest.mark.parametrize(
    ("redraw", "is_sound"),
    [
        (Redraw(1, 4, 0.5), True),
        (Redraw(1, 4, 0.0), True),
        (Redraw(1, 4, -0.1), False),
        (Redraw(2, 4, 0.5), False),
        (Redraw(1, 8, 0.5), False),
    ],
)
def test_an_audit_draws_anew_where_its_verdict_has_tokens(redraw: Redraw, *, is_sound: bool):
    text = resumed()
    verdict = TextVerdict("r", 0, 3, token_array([3]), NO_SOURCES, redraws=(redraw,))
    assert problem_of(verdict, text, 8) is not None  # no audit
    text.is_audit = True
    assert (problem_of(verdict, text, 8) is None) is is_sound


async def test_a_target_that_says_that_it_is_full_has_no_room_until_it_says_more():
    async with at_work() as stage:
        asking = stage.begin()
        seat = stage.seat
        await stage.settle(1)  # it has a place; its target has not taken it
        (text,) = seat.sessions.values()
        full = Refusal(text.id, text.generation, CapacityError.code, "full")
        stage.coordinator._targets._take_refusal(seat, text, full)
        assert not seat.has_room()
        seat.note_load(Load(seats=4))
        assert seat.has_room()
        stage.coordinator.tick()
        assert (await asking)[-1].finish_reason is not FinishReason.ERROR


async def test_a_lost_target_holds_no_text_and_nothing_that_it_said_before_counts():
    async with at_work(ToyTarget(is_held=True)) as stage:
        events = []
        stage.coordinator._table.open("r", request(), events.append)
        seat = stage.seat
        (text,) = seat.sessions.values()
        late = TextVerdict(text.id, text.generation, 3, token_array([3]), NO_SOURCES)
        stage.coordinator.remove_target(seat.id)
        assert not seat.sessions
        assert not text.shunned_target
        stage.coordinator._targets._take(seat, VerdictFrame(verdicts=(late,)))
        assert len(text.tokens) == 3
        assert not events
