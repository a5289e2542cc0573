"""The ingress' streams to coordinators: requests survive the loss of a coordinator.

Real coordinators on in-process links, with the toy target whose text is a pure function.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.config.schema import CoordinatorConfig
from cluster.core import SamplingParams, TokenEvent, token_array
from cluster.errors import (
    CapacityError,
    TooLargeError,
    UnavailableError,
)
from cluster.rpc.connections import Endpoint
from cluster.rpc.link import Link, memory_pair
from cluster.rpc.messages import EventFrame, Load, SubmitFrame, WorkerDescription
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.ticket import Ticket
from tests.support.coordinator.house import House, collect, house, request
from tests.support.coordinator.toys import plain_text
from tests.support.deployments.stage import Stage, stage

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=60)


async def read(
    ticket: Ticket, arrived: asyncio.Event, before: Sequence[int] = (), *, least: int = 10**6
) -> list[int]:
    """Tokens up to the end, or so many of them at least; before: those that were read."""
    tokens = [*before]
    async with asyncio.timeout(20):
        while True:
            for event in ticket.take():
                assert event.position == len(tokens)
                tokens += event.token_ids.tolist()
                if event.finish_reason is not None:
                    return tokens
            if len(tokens) >= least:
                return tokens
            await arrived.wait()
            arrived.clear()


def ask(ingress: Coordinators, **more: Any) -> tuple[Ticket, asyncio.Event]:
    arrived = asyncio.Event()
    return ingress.submit(request(params=PARAMS, **more), arrived), arrived


async def held(setting: Stage, first: House) -> tuple[Ticket, asyncio.Event]:
    """A request that a coordinator "a" has, and whose target says nothing."""
    toy = setting.add("a", first)
    await asyncio.sleep(0)
    toy.gate.clear()
    asked = ask(setting.ingress)
    await toy.wait_for_frames(1)
    return asked


async def test_a_request_continues_on_another_coordinator_with_the_same_text():
    async with stage() as setting, house() as first, house() as second:
        toys = {"a": setting.add("a", first), "b": setting.add("b", second)}
        await asyncio.sleep(0)
        ticket, arrived = ask(setting.ingress)
        tokens = await read(ticket, arrived, least=1)
        lost = ticket.peer.id
        toys[lost].gate.clear()  # it says no more
        setting.links[lost].sever()
        assert await read(ticket, arrived, tokens) == plain_text([1, 2, 3], PARAMS)
        assert ticket.failovers == 1


async def test_a_coordinator_that_is_stopped_hands_its_requests_over():
    async with stage() as setting, house() as first:
        ticket, arrived = await held(setting, first)
        async with house() as second:
            setting.add("b", second)
            await first.coordinator.stop()
            setting.links["a"].sever()
            assert await read(ticket, arrived) == plain_text([1, 2, 3], PARAMS)


async def test_without_a_coordinator_a_request_is_answered_unavailable():
    async with stage() as setting:
        with pytest.raises(UnavailableError, match="no coordinator"):
            await read(*ask(setting.ingress))


async def test_a_request_over_the_frame_limit_does_not_affect_others(
    monkeypatch: pytest.MonkeyPatch,
):
    async with stage() as setting, house() as only:
        setting.add("a", only)
        await asyncio.sleep(0)
        ingress, link = setting.ingress, setting.links["a"]
        send = link.send

        async def narrow(frame: SubmitFrame) -> None:
            """As links over gRPC, which refuse a frame with a too large item."""
            if any(len(one.prompt_ids) > 10 for one in frame.requests):
                raise TooLargeError("one item is too large")
            await send(frame)

        monkeypatch.setattr(link, "send", narrow)
        events = {name: asyncio.Event() for name in ("before", "large", "after")}
        tickets = {
            name: ingress.submit(
                request([1] * 20 if name == "large" else [1, 2, 3], PARAMS, id=name), arrived
            )
            for name, arrived in events.items()
        }
        with pytest.raises(TooLargeError):
            await read(tickets["large"], events["large"])
        for name in ("before", "after"):
            assert await read(tickets[name], events[name]) == plain_text([1, 2, 3], PARAMS)
            assert tickets[name].failovers == 0


@pytest.mark.parametrize("is_lost_first", [True, False])
async def test_a_cancelled_request_does_not_run_again_elsewhere(is_lost_first: bool):
    async with stage() as setting, house() as first, house() as second:
        ticket, arrived = await held(setting, first)
        if is_lost_first:
            setting.links["a"].sever()
            await first.settle()
            ticket.complete()
        else:
            ticket.complete()
            setting.links["a"].sever()
        await first.settle()
        assert ticket.finished
        assert arrived.is_set()
        other = setting.add("b", second)
        await second.settle()
        assert other.frames == []


async def test_an_accepted_request_is_not_refused_for_want_of_room_after_a_failover():
    full = house(max_running_sequences=1, max_queued_requests=0)
    async with stage() as setting, house() as first, full as second:
        ticket, arrived = await held(setting, first)
        busy = setting.add("b", second)
        await second.settle()
        busy.gate.clear()
        other, other_news = ask(setting.ingress, id="other")
        await busy.wait_for_frames(1)
        setting.links["a"].sever()
        await second.settle()
        busy.gate.set()
        assert await read(other, other_news) == plain_text([1, 2, 3], PARAMS)
        assert await read(ticket, arrived) == plain_text([1, 2, 3], PARAMS)
        assert ticket.failovers >= 1


Ours = Link[EventFrame, SubmitFrame]


@asynccontextmanager
async def peers(ingress: Coordinators, *names: str) -> AsyncIterator[dict[str, Ours]]:
    """Coordinators that the test plays itself."""
    description = WorkerDescription("c", "coordinator", "c", max_running_sequences=64)
    pairs = {name: memory_pair() for name in names}
    using = [
        asyncio.create_task(ingress.use(Endpoint(name, ""), description, theirs))
        for name, (_, theirs) in pairs.items()
    ]
    await asyncio.sleep(0)
    try:
        yield {name: ours for name, (ours, _) in pairs.items()}
    finally:
        for task in using:
            task.cancel()
        await asyncio.gather(*using, return_exceptions=True)


async def test_a_coordinator_that_falls_silent_is_left_and_its_requests_go_on_elsewhere():
    ingress = Coordinators(CoordinatorConfig(target_silence_s=1.5))  # heartbeats come every second
    async with asyncio.timeout(20), house() as heard, peers(ingress, "mute") as links:
        ticket, arrived = ask(ingress)
        frame = await anext(links["mute"])
        whole = plain_text([1, 2, 3], PARAMS)
        event = TokenEvent(frame.requests[0].id, 0, token_array(whole[:5]))
        await links["mute"].send(EventFrame((event,)))
        setting = Stage(ingress)
        setting.add("heard", heard)
        assert await read(ticket, arrived) == whole
        assert [*ingress.links] == ["heard"]
        assert ticket.failovers == 1
        await setting.close()


async def placed(ingress: Coordinators, count: int) -> list[str]:
    """Where new requests go."""
    chosen = []
    for _ in range(count):
        ticket = ingress.submit(request(id=f"r{next(_numbers)}"), asyncio.Event())
        chosen.append(ticket.peer.id)
    return chosen


_numbers = itertools.count()


async def says(link: Ours, load: Load) -> None:
    await link.send(EventFrame(load=load))
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_go_to_the_coordinator_that_has_least_in_hand_of_all_ingresses():
    ingress = Coordinators(CoordinatorConfig())
    async with peers(ingress, "a", "b") as links:
        assert sorted(await placed(ingress, 4)) == ["a", "a", "b", "b"]
        await says(links["a"], Load(num_running=5, seats=8))
        await says(links["b"], Load(num_running=2, seats=8))
        assert await placed(ingress, 3) == ["b", "b", "b"]
        assert sorted(await placed(ingress, 2)) == ["a", "b"]
        await says(links["b"], Load(num_running=6, seats=0))  # without targets
        assert await placed(ingress, 3) == ["a", "a", "a"]
        await says(links["a"], Load(num_running=9, seats=0))
        assert await placed(ingress, 1) == ["b"]


async def test_a_request_is_sent_away_only_when_no_coordinator_has_room():
    full = house(max_running_sequences=1, max_queued_requests=0)
    async with stage() as setting, full as first, house() as second:
        busy = setting.add("busy", first)
        await first.settle()  # it says that it has nothing to do
        busy.gate.clear()
        filling = asyncio.create_task(collect(first.coordinator, request(id="of another ingress")))
        await busy.wait_for_frames(1)
        ticket, arrived = ask(setting.ingress, id="sent away")
        with pytest.raises(CapacityError):
            await read(ticket, arrived)
        setting.add("free", second)
        await second.settle()
        ticket = setting.ingress.submit(request(params=PARAMS), arrived)
        assert ticket.peer.id == "busy"
        assert await read(ticket, arrived) == plain_text([1, 2, 3], PARAMS)
        assert (ticket.failovers, ticket.refused_by) == (0, {"busy"})
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
