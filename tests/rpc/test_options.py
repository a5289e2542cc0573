"""gRPC's options: it knows each of them, and a link that is idle for long is left in peace."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from cluster.client.endpoint import Endpoint
from cluster.rpc.options import channel_options, public_server_options, server_options
from cluster.rpc.trust import dns_name

Options = Sequence[tuple[str, Any]]

FRAME = 4 * 1024 * 1024
OURS = {
    "channel": channel_options(FRAME),
    "server": server_options(FRAME),
    "public server": public_server_options(FRAME, 8),
    "client": Endpoint("127.0.0.1:1", tls=True, server_name=dns_name("target")).options(),
}
# gRPC sends no ping sooner than a second after the last.
PING_MS = 1000
# With the default of strikes the fourth ping ends a link where pings are unwelcome, so that nobody
# waits for those that our servers allow beside it.
QUIET_S = 6.0


@pytest.mark.parametrize("whose", OURS)
def test_the_installed_grpc_knows_the_name_of_every_option(whose: str):
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in OURS[whose] if name.encode() not in library] == []


def hastened(options: Options, factor: float) -> Options:
    """The options with their times between pings divided by `factor`, and gRPC's own strikes."""
    hurried = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")
    return [
        (name, round(value / factor) if name in hurried else value)
        for name, value in options
        if name != "grpc.http2.max_ping_strikes"
    ]


async def echo(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


@pytest.mark.parametrize(
    ("server", "client"),
    [
        (server_options(FRAME), channel_options(FRAME)),
        # What `Endpoint` says that our listeners permit.
        (public_server_options(FRAME, 8), Endpoint("127.0.0.1:1", ping_s=1.0).options()),
    ],
    ids=["parts", "public"],
)
async def test_an_idle_link_outlives_its_pings(server: Options, client: Options):
    factor = dict(client)["grpc.keepalive_time_ms"] / PING_MS
    serving = grpc.aio.server(options=hastened(server, factor))
    handlers = {"Talk": grpc.stream_stream_rpc_method_handler(echo)}
    serving.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", handlers),))
    port = serving.add_insecure_port("127.0.0.1:0")
    await serving.start()
    try:
        where, options = f"127.0.0.1:{port}", hastened(client, factor)
        async with grpc.aio.insecure_channel(where, options=options) as channel:
            call = channel.stream_stream("/Echo/Talk")()
            await call.write(b"a")
            assert await call.read() == b"a"
            answer = asyncio.ensure_future(call.read())
            await asyncio.wait({answer}, timeout=QUIET_S)
            await call.write(b"b")
            assert await answer == b"b"
    finally:
        await serving.stop(None)
