"""What a client of the gRPC endpoint may send: bounded, uncompressed, and nobody else notices."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client.errors import BusyError, error_of
from cluster.config.schema import Config
from tests.support.deployments.place import generate, place

WHOLE = health_pb2.HealthCheckRequest()
GENERATE = "/drafthouse.v1.GenerationService/Generate"
PATIENCE_S = 20.0


@asynccontextmanager
async def listening() -> AsyncIterator[Config]:
    """A listener, and somebody's stream that is open before and after what happens inside."""
    async with place() as here, here.listening() as (own, _):
        watch = health_pb2_grpc.HealthStub(own).Watch(WHOLE)
        await watch.read()
        yield here.ingress.config
        assert not watch.done()
        await here.ingress.drain()
        await watch.read()  # that it stops
        assert await watch.code() is grpc.StatusCode.OK


def channel(config: Config, *options: tuple[str, int]) -> grpc.aio.Channel:
    own = [("grpc.use_local_subchannel_pool", 1), *options]
    return grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc.port}", options=own)


async def status(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async with asyncio.timeout(PATIENCE_S):
            await call.read()
    return raised.value.code(), raised.value.details() or ""


async def test_what_swells_or_is_too_long_is_refused():
    bomb = bytes(64 * 2**20)
    async with (
        listening() as config,
        channel(config, ("grpc.max_send_message_length", -1)) as stranger,
    ):
        generate = stranger.unary_stream(GENERATE)
        code, details = await status(generate(bomb, compression=grpc.Compression.Gzip))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in details
        code, details = await status(generate(bomb))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        code, details = await status(generate(b"", metadata=(("long", "x" * 20_000),)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "metadata" in details


async def test_calls_beyond_the_limit_are_told_that_the_server_is_full():
    async with listening() as config, channel(config) as one, channel(config) as other:
        # Somebody's stream is there already.
        stubs = [health_pb2_grpc.HealthStub(each) for each in (one, other)]
        watches = []
        for number in range(config.max_calls - 1):
            watches.append(stubs[number % 2].Watch(WHOLE))
            assert await watches[-1].read() is not grpc.aio.EOF
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stubs[0].Watch(WHOLE).read()
        assert isinstance(error_of(raised.value, "there"), BusyError)
        for watch in watches:
            watch.cancel()


async def test_where_there_are_keys_half_of_the_places_are_for_them(write: Callable[..., Config]):
    async with place(write(alice={})) as here, here.listening() as (own, _):
        stub, most = health_pb2_grpc.HealthStub(own), here.ingress.config.max_calls // 2
        for _ in range(most):
            await stub.Check(WHOLE)  # its place is free then
        watches = [stub.Watch(WHOLE) for _ in range(most)]
        for watch in watches:
            await watch.read()
        code, _ = await status(stub.Watch(WHOLE))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await generate(own, "alice").read()
        for watch in watches:
            watch.cancel()
