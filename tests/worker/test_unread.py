"""Peers that send without an end, or do not read: what waits for them stays bounded."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import pytest

from cluster.core import Observation
from cluster.errors import CapacityError, WorkerError
from cluster.rpc.link import memory_pair
from cluster.rpc.messages import AdapterList, CommitFrame, StepFrame
from cluster.worker.draft_worker import DrafterLoad, DraftLease
from cluster.worker.mailbox import MAX_BACKLOG, TargetStream, ThreadMail
from tests.support.worker.draft_peer import PATIENCE_S, CountingDrafter, House, house, opening
from tests.support.worker.stage import Stage, stage, worker_of
from tests.support.worker.texts import opened, plain
from tests.worker.test_draft_worker import Busy
from tests.worker.test_target_worker import GatedEngine

MANY = 4 * MAX_BACKLOG


async def flooded(worker: Stage | House, send: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Send without an end, until no more is read, and check how much was; returns what is sent."""

    async def flood() -> None:
        for _ in range(MANY):
            await send()

    sending = asyncio.create_task(flood())
    waiting = worker.worker._mailbox._calls
    for _ in range(MANY):
        await asyncio.sleep(0)
        if waiting.qsize() > MAX_BACKLOG:
            break
    for _ in range(MANY):
        await asyncio.sleep(0)
    assert waiting.qsize() <= MAX_BACKLOG + 3  # with what is asked of the thread
    assert not sending.done()
    return sending


async def test_a_coordinator_that_sends_without_an_end_waits_for_the_target():
    engine = GatedEngine()
    engine.gate.clear()
    async with stage(worker_of({}, engine)) as built:
        neighbour = built.connect()
        await neighbour.open(opened("kept"))
        assert await asyncio.to_thread(engine.stepping.wait, PATIENCE_S)
        sending = await flooded(built, partial(built.connect().send, StepFrame()))
        engine.gate.set()
        await neighbour.until(lambda: neighbour.is_over("kept"))
        assert neighbour.text("kept") == plain()
        await asyncio.wait_for(sending, PATIENCE_S)


async def test_a_target_leaves_a_coordinator_that_does_not_read():
    async with stage(worker_of({})) as built:
        neighbour = built.connect()
        ours, theirs = memory_pair(window=1)
        serving = asyncio.create_task(built.worker.serve(theirs))
        await asyncio.sleep(0)
        assert len(list(built.worker.streams)) == 2
        for _ in range(TargetStream.max_unread + 8):
            built.worker.streams.announce(AdapterList())
        with suppress(WorkerError):  # the link is over
            for _ in range(3):  # what is unread is counted with each
                await ours.send(StepFrame())
                await asyncio.sleep(0.01)
        with pytest.raises(CapacityError, match="frames are unread"):
            await asyncio.wait_for(serving, PATIENCE_S)
        assert await neighbour.written(opened()) == [plain()]


async def test_a_drafter_leaves_a_coordinator_that_does_not_read():
    async with house(CountingDrafter()) as running:
        ours, theirs = memory_pair(window=1)
        serving = asyncio.create_task(running.worker.serve(theirs))
        await asyncio.sleep(0)
        (lease,) = running.worker._leases
        neighbour = running.connect()
        for _ in range(8):  # the first few are on their way
            news = [Observation(f"r{number}", 1, 1) for number in range(DraftLease.max_unread + 1)]
            lease.put(news, DrafterLoad())
            with suppress(WorkerError):  # the link is over
                await asyncio.wait_for(ours.send(CommitFrame()), PATIENCE_S)
        with pytest.raises(CapacityError, match="notices are unread"):
            await asyncio.wait_for(serving, PATIENCE_S)
        await neighbour.send(opening("a", [1, 2]))
        assert (await neighbour.proposal("a")).base_len == 2


async def test_a_coordinator_that_sends_without_an_end_waits_for_the_drafter():
    drafter = Busy()
    async with house(drafter) as running:
        neighbour, flooder = running.connect(), running.connect()
        await neighbour.send(opening("a", [1, 2]))
        assert await asyncio.to_thread(drafter.began.wait, PATIENCE_S)
        sending = await flooded(running, partial(flooder.send, released=("nobody",)))
        drafter.gate.set()
        assert (await neighbour.proposal("a")).base_len == 2
        await asyncio.wait_for(sending, PATIENCE_S)


# What is left for a worker's thread: calls, which it makes in their order.


def test_calls_are_made_in_order_by_whoever_takes_and_give_back_what_they_return_or_raise():
    mailbox, made = ThreadMail(), []
    mailbox.put(partial(made.append, 1))
    where, failing = mailbox.call(threading.get_ident), mailbox.call(lambda: 1 // 0)
    mailbox.call(partial(made.append, "given up")).cancel()
    mailbox.put(partial(made.append, 2))
    taking = threading.Thread(target=lambda: mailbox.take(is_busy=False))
    taking.start()
    taking.join(20)
    assert made == [1, 2]
    assert where.result(0) == taking.ident
    with pytest.raises(ZeroDivisionError):
        failing.result(0)
    assert mailbox.take(is_busy=True)
    assert made == [1, 2]


def test_calls_behind_one_that_ends_the_thread_and_after_the_end_are_cancelled():
    mailbox = ThreadMail()
    mailbox.put(lambda: 1 // 0)
    before = mailbox.call(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        mailbox.take(is_busy=True)
    mailbox.close()
    after = mailbox.call(lambda: 2)
    assert before.cancelled()
    assert after.cancelled()
    assert not mailbox.take(is_busy=True)
