"""The in-process link fulfils the `Link` protocol."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from cluster.errors import WorkerError
from cluster.rpc.link import memory_pair


async def begun(*waiting: Awaitable[Any]) -> list[asyncio.Future[Any]]:
    """Let each go as far as it gets."""
    tasks = list(map(asyncio.ensure_future, waiting))
    await asyncio.wait(tasks, timeout=0)
    return tasks


async def test_closing_lets_the_peer_read_what_was_sent_and_then_ends_both_sides():
    left, right = memory_pair()
    await left.send("last words")
    await left.close()
    await left.close()
    assert [message async for message in right] == ["last words"]
    assert [message async for message in left] == []
    for link in (left, right):
        with pytest.raises(WorkerError):
            await link.send("too late")


async def test_send_waits_while_the_window_is_full():
    left, right = memory_pair(window=2)
    await left.send(1)
    await left.send(2)
    (third,) = await begun(left.send(3))
    assert not third.done()
    assert await anext(aiter(right)) == 1
    await third
    assert [await anext(aiter(right)) for _ in range(2)] == [2, 3]


async def test_a_severed_link_delivers_what_had_arrived_and_then_raises():
    left, right = memory_pair(window=1)
    await left.send("arrived")
    (waiting,) = await begun(left.send(2))
    right.sever()
    with pytest.raises(WorkerError, match="lost"):
        await waiting
    assert await anext(aiter(right)) == "arrived"
    for link in (left, right):
        with pytest.raises(WorkerError):
            await anext(aiter(link))


async def test_cancelling_a_waiting_sender_loses_no_other_message():
    left, right = memory_pair(window=1)
    await left.send(1)
    impatient, patient = await begun(left.send(2), left.send(3))
    impatient.cancel()
    await asyncio.wait({impatient})
    assert await anext(aiter(right)) == 1
    await patient
    assert await anext(aiter(right)) == 3


async def test_a_cancelled_reader_loses_no_message():
    left, right = memory_pair()
    (reading,) = await begun(anext(aiter(right)))
    reading.cancel()
    await asyncio.wait({reading})
    await left.send("still here")
    assert await anext(aiter(right)) == "still here"
