"""Links over real gRPC streams: order, back-pressure, endings, malformed items."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from cluster.client.generated import common_pb2
from cluster.errors import CapacityError, TooLargeError, WorkerError
from cluster.rpc.channel import connect_coordinator, connect_target
from cluster.rpc.generated import target_pb2
from cluster.rpc.messages import StepFrame, TextName
from cluster.rpc.server import serve_worker
from tests.support.rpc.frames_strategy import text
from tests.support.rpc.toys import (
    EchoCoordinator,
    EchoTarget,
    FailingTarget,
    HangingTarget,
    LeavingTarget,
    stopping,
)

PATIENCE_S = 20.0


def frame(*names: str, length: int = 3) -> StepFrame:
    return StepFrame(tuple(text(name, length) for name in names))


@asynccontextmanager
async def linked(worker: EchoTarget, **options: int) -> AsyncIterator[Any]:
    """A client's link to a server of that worker."""
    async with stopping(await serve_worker(worker, **options)) as server:
        _, link = await connect_target(server.address, **options)
        yield link
        await link.close()


@asynccontextmanager
async def streaming(worker: EchoTarget, *codec: Callable[..., Any]) -> AsyncIterator[Any]:
    """The same stream by gRPC's own means."""
    method = "/drafthouse.internal.v1.TargetService/Steps"
    async with (
        stopping(await serve_worker(worker)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield channel.stream_stream(method, *codec)()


async def test_a_watcher_reads_events_until_it_leaves_and_no_other_call_waits():
    toy = EchoCoordinator()
    async with stopping(await serve_worker(toy)) as server:
        _, link = await connect_coordinator(server.address)
        async with asyncio.timeout(PATIENCE_S):
            async with contextlib.aclosing(link.watch()) as events:
                told = [await anext(events) for _ in range(3)]
                assert await link.status() == {"targets": ["w-1"], "running": 0}
                assert not toy.left.is_set()
            await toy.left.wait()
            events = link.watch()
            await anext(events)
            await link.close()
            with pytest.raises(WorkerError):
                await anext(events)
    assert told == [("rounds", "0"), ("rounds", "1"), ("rounds", "2")]


async def test_closing_the_link_ends_the_workers_iteration_after_all_frames():
    worker = EchoTarget()
    async with linked(worker) as link:
        await link.send(StepFrame(cancels=(TextName("a", 1), TextName("b", 1))))
        await link.close()
        await link.close()
        assert await asyncio.wait_for(worker.endings.get(), PATIENCE_S) == "closed"
        assert worker.cancelled == ["a", "b"]
        assert [message async for message in link] == []
        with pytest.raises(WorkerError):
            await link.send(frame("late"))


async def test_a_client_that_vanishes_ends_the_workers_iteration():
    worker = EchoTarget()
    async with streaming(worker) as call:
        await call.initial_metadata()
        call.cancel()
        # gRPC reports a cancelled call's end of stream before or after the cancellation itself: the
        # worker may see either, and frees the stream's state after both.
        ending = await asyncio.wait_for(worker.endings.get(), PATIENCE_S)
        assert ending in {"closed", WorkerError.code}


async def test_a_server_that_stops_breaks_the_clients_link():
    server = await serve_worker(EchoTarget())
    _, link = await connect_target(server.address)
    await server.stop(0.0)
    with pytest.raises(WorkerError, match=server.address):
        await asyncio.wait_for(anext(aiter(link)), PATIENCE_S)
    with pytest.raises(WorkerError):
        await link.send(frame("a"))
    await link.close()


async def test_a_worker_that_closes_ends_the_clients_iteration_cleanly():
    async with linked(LeavingTarget()) as link:
        await link.send(frame("a"))
        answers = [answer async for answer in link]
        assert [verdict.request_id for answer in answers for verdict in answer.verdicts] == ["a"]
        with pytest.raises(WorkerError):
            await link.send(frame("b"))


@pytest.mark.parametrize(
    "error", [CapacityError("led by another coordinator"), RuntimeError("a bug")]
)
async def test_a_worker_that_raises_breaks_that_stream_only(error: Exception):
    async with stopping(await serve_worker(FailingTarget(error))) as server:
        _, broken = await connect_target(server.address)
        _, healthy = await connect_target(server.address)
        await broken.send(frame("a"))
        with pytest.raises(WorkerError) as raised:
            await anext(aiter(broken))
        told = "led by another coordinator" if isinstance(error, CapacityError) else "RuntimeError"
        assert told in raised.value.message
        reading = asyncio.ensure_future(anext(aiter(healthy)))
        await asyncio.wait({reading}, timeout=0.05)
        assert not reading.done()
        reading.cancel()
        await broken.close()
        await healthy.close()


async def test_a_worker_that_does_not_read_blocks_its_sender():
    async with linked(HangingTarget()) as link:
        heavy = frame("a", length=100_000)

        async def flood() -> None:
            for _ in range(10_000):
                await link.send(heavy)

        flooding = asyncio.ensure_future(flood())
        # 10,000 frames of 400 kB would be 4 GB: only back-pressure keeps this from finishing.
        done, _ = await asyncio.wait({flooding}, timeout=1.0)
        assert not done
        flooding.cancel()


async def test_a_frame_over_the_limit_arrives_in_parts_and_an_item_over_it_is_refused():
    async with linked(EchoTarget(), max_frame_bytes=8192) as link:
        names = [f"r{number}" for number in range(8)]
        await link.send(frame(*names, length=1000))
        answered = []
        async for answer in link:
            answered += [verdict.request_id for verdict in answer.verdicts]
            if len(answered) == len(names):
                break
        assert sorted(answered) == names
        with pytest.raises(TooLargeError, match="limit is 8192"):
            await link.send(frame("huge", length=5000))
        await link.send(frame("fine"))
        assert (await anext(aiter(link))).verdicts[0].request_id == "fine"


async def test_a_malformed_item_is_refused_over_the_wire_and_the_stream_continues():
    codec = target_pb2.StepFrame.SerializeToString, target_pb2.VerdictFrame.FromString
    async with streaming(EchoTarget(), *codec) as call:
        params = common_pb2.SamplingParams()
        torn = target_pb2.Open(request_id="torn", generation=2, token_ids=b"\x01", params=params)
        good = target_pb2.Open(request_id="good", token_ids=b"\x01\x00\x00\x00", params=params)
        await call.write(target_pb2.StepFrame(opens=[torn, good]))
        refusals = []
        verdicts = []
        while not (refusals and verdicts):
            answer = await call.read()
            refusals += answer.refusals
            verdicts += answer.verdicts
        assert [(r.request_id, r.generation, r.code) for r in refusals] == [
            ("torn", 2, "protocol_error")
        ]
        assert [verdict.request_id for verdict in verdicts] == ["good"]
        call.cancel()


async def test_bytes_that_are_not_a_frame_end_the_senders_stream():
    worker = EchoTarget()
    async with streaming(worker) as call:
        await call.write(b"\xff\xff\xff\xff")
        assert await call.read() is grpc.aio.EOF
        assert await asyncio.wait_for(worker.endings.get(), PATIENCE_S) == WorkerError.code


async def test_no_task_outlives_its_link_or_server():
    before = asyncio.all_tasks()
    server = await serve_worker(EchoTarget())
    for number in range(3):
        _, link = await connect_target(server.address)
        await link.send(frame(f"r{number}"))
        await anext(aiter(link))
        await link.close()
    _, abandoned = await connect_target(server.address)
    await server.stop(0.0)
    with pytest.raises(WorkerError):
        await anext(aiter(abandoned))
    await abandoned.close()
    gc.collect()
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while asyncio.all_tasks() - before:
        assert asyncio.get_running_loop().time() < deadline, asyncio.all_tasks() - before
        await asyncio.sleep(0)
