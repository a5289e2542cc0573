"""Ingress links: many requests over one stream, and all of them freed with it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.coordinator.ingress import _MAX_UNREAD, IngressLink
from cluster.coordinator.session import Deliver
from cluster.core import EMPTY_TOKENS, FinishReason, Request, TokenEvent
from cluster.errors import CapacityError, RequestError
from cluster.rpc.link import Link, memory_pair
from cluster.rpc.messages import Load, SubmitFrame
from tests.support.coordinator.house import GREEDY, House, at_work, house, request, text_of
from tests.support.coordinator.toys import ToyTarget, plain_text

LONG = replace(GREEDY, max_tokens=4000)
PLAIN = plain_text([1, 2, 3], GREEDY)


def connect(stage: House) -> Link[Any, Any]:
    ours, theirs = memory_pair()
    stage.tasks.append(asyncio.create_task(stage.coordinator.serve(theirs)))
    return ours


async def read(link: Link[Any, Any], *names: str) -> dict[str, list[TokenEvent]]:
    """Everything until all of `names` have finished."""
    events: dict[str, list[TokenEvent]] = {name: [] for name in names}
    async with asyncio.timeout(20):
        async for frame in link:
            for event in frame.events:
                events[event.request_id].append(event)
            if all(each and each[-1].finish_reason for each in events.values()):
                break
    return events


async def test_each_ingress_hears_how_busy_the_coordinator_is_with_all_of_them():
    async with house(drafters=(), max_running_sequences=1) as stage:
        first = connect(stage)
        assert (await anext(first)).load == Load(seats=0)  # there is no target
        target = ToyTarget(is_held=True)
        stage.add_target(target)
        await first.send(SubmitFrame((request(id="x"), request(id="y"))))
        await target.wait_for_frames(1)
        assert (await anext(connect(stage))).load == Load(64, num_running=1, num_waiting=1)


async def test_a_cancelled_request_is_freed_and_others_go_on():
    target = ToyTarget()
    async with at_work(target, drafters=()) as stage:
        link = connect(stage)
        long = (request(params=LONG, id=name) for name in "xz")
        await link.send(SubmitFrame((*long, request(id="y"))))
        await target.wait_for_steps(4)
        await link.send(SubmitFrame((), ("x", "unknown"), ("z",)))
        events = await read(link, "x", "y", "z")
        await stage.settle(60)
        assert events["x"][-1].finish_reason is FinishReason.CANCELLED
        assert events["z"][-1].finish_reason is FinishReason.STOP
        assert text_of(events["y"]) == PLAIN
        assert target.contexts == {}


async def test_a_link_that_breaks_frees_its_requests_and_no_others():
    target = ToyTarget()
    async with at_work(target, drafters=()) as stage:
        lost, other = connect(stage), connect(stage)
        await lost.send(SubmitFrame((request(params=LONG, id="x"),)))
        await other.send(SubmitFrame((request(id="x"),)))
        await target.wait_for_steps(4)
        lost.sever()
        assert text_of((await read(other, "x"))["x"]) == PLAIN
        await stage.settle(60)
        assert target.contexts == {}
        assert stage.status()["num_running"] == 0


async def test_an_id_sent_twice_or_a_refused_request_does_not_end_the_first_one():
    async with at_work(drafters=()) as stage:
        link = connect(stage)
        again = request(id="again", was_admitted=True)
        sent = request(id="x"), request([7], id="x"), request([], id="refused"), again
        await link.send(SubmitFrame(sent))
        events = await read(link, "x", "refused", "again")
        assert text_of(events["x"]) == text_of(events["again"]) == PLAIN
        # That it is taken is news to the client of one that was never admitted before.
        assert [len(events[name][0].token_ids) for name in ("x", "again")] == [0, 1]
        (refused,) = events["refused"]
        assert refused.error_code == RequestError.code


class Talkative:
    """Takes every request, and says more of it than anybody reads."""

    adapters, sessions, ingresses = None, set(), set()

    def open(self, session_id: str, request: Request, deliver: Deliver) -> None:
        self.sessions.add(session_id)
        for position in range(_MAX_UNREAD + 1000):
            deliver(TokenEvent(request.id, position, EMPTY_TOKENS))

    def cancel(self, session_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.cancelled = session_id

    def load(self) -> Load:
        return Load()


async def test_an_ingress_that_does_not_read_is_left_and_its_requests_are_freed():
    taker = Talkative()
    ours, theirs = memory_pair(window=1)
    link = IngressLink(taker, theirs, "1/", taker)
    serving = asyncio.create_task(link.serve())
    await ours.send(SubmitFrame((request(id="x"),)))
    with pytest.raises(CapacityError, match="events are unread"):
        await asyncio.wait_for(serving, 20)
    assert taker.cancelled == "1/x"
