"""What a target is told, and when."""

import asyncio
from typing import Any

import numpy as np

from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import SamplingParams, TokenTree
from cluster.messages import (
    Load,
    PoolTree,
    StepFrame,
    TextName,
    VerdictFrame,
    WorkerDescription,
)
from cluster.rpc.link import MemoryLink, memory_pair
from tests.support.coordinator.house import request


class Target:
    """The other end of a seat."""

    def __init__(self, max_frame_tokens: int = 1000) -> None:
        ours, self.link = memory_pair()
        description = WorkerDescription("t", "target", "t", vocab_size=8, max_running_sequences=3)
        self.seat = TargetSeat("t", description, ours, max_frame_tokens)
        self._ours: MemoryLink[Any, Any] = ours

    async def told(self) -> list[StepFrame]:
        """What is sent now."""
        await self.seat.flush()
        frames: list[StepFrame] = []
        while True:
            try:
                async with asyncio.timeout(0.0):
                    frames.append(await anext(self.link))
            except TimeoutError:
                return frames


def session(name: str, num_tokens: int = 3) -> Session:
    asked = request([1] * num_tokens, SamplingParams(max_tokens=9), id=name)
    return Session(name, asked, lambda event: None, 0.0)


def tree(name: str, base_len: int = 3) -> PoolTree:
    drafts, bits = TokenTree.chain([1, 2]), np.array([1, 1], np.uint32)
    return PoolTree(name, 0, base_len, 0, drafts, np.array([0.5, 0.25], np.float32), bits)


async def test_long_texts_go_in_frames_of_their_own():
    target = Target(max_frame_tokens=10)
    for name, num_tokens in (("a", 4), ("b", 4), ("c", 4), ("long", 30), ("d", 1)):
        target.seat.open(session(name, num_tokens))
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
    one, other = session("one"), session("other")
    target.seat.open(one)
    target.seat.open(other)
    target.seat.drop(one)
    (frame,) = await target.told()
    assert [opened.request_id for opened in frame.opens] == ["other"]
    assert frame.cancels == (TextName("one", 0),)


async def test_the_newest_tree_of_a_text_that_runs_is_sent():
    target = Target()
    running = session("running")
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
    target.seat.open(session("any frame says it"))
    target.seat.heard(VerdictFrame(serial=17))
    assert [frame.acknowledged for frame in await target.told()] == [17]


async def test_a_heartbeat_names_the_texts_once_all_of_them_were_sent():
    target = Target(max_frame_tokens=4)
    for name in ("a", "b"):
        target.seat.open(session(name))
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
    seat.open(session("a"))
    assert (seat.has_room(), seat.num_free) == (True, 2)
    seat.open(session("b"))
    assert (seat.has_room(), seat.num_free) == (False, 1)
    seat.note_load(Load(seats=99, num_running=3, num_waiting=9))  # no more than there are
    assert (seat.has_room(), seat.num_free) == (True, 0)
    seat.is_full = True
    assert not seat.has_room()
    seat.note_load(Load(seats=3))
    assert (seat.has_room(), seat.num_free) == (True, 1)
