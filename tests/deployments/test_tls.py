"""TLS of the ingress' own listeners: clients, strangers to it, and a replaced certificate."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.doors import TlsConfig
from cluster.config.schema import GrpcConfig
from cluster.core import SamplingParams
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_listener import GrpcListener
from deployments.ingress.ingress import Ingress
from deployments.readiness import base_url, health
from tests.deployments.conftest import free_port
from tests.support.deployments.server import tiny_config
from tests.support.deployments.site import site
from tests.support.deployments.stage import Nowhere
from tests.support.rpc.certificates import Authority

AUTHORITY = Authority.new()
NUM_STREAMS = 4
PATIENCE_S = 20.0
WHOLE = health_pb2.HealthCheckRequest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return AUTHORITY.write(tmp_path, "localhost")


def tls(folder: Path) -> TlsConfig:
    return TlsConfig(str(folder / "cert.pem"), str(folder / "key.pem"))


def trusting(authority: Authority = AUTHORITY) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.cert.decode())


@asynccontextmanager
async def open_streams(port: int) -> AsyncIterator[list[AsyncIterator[bytes]]]:
    """Streams on connections of their own, each with its first letter read."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(verify=trusting(), limits=limits, timeout=PATIENCE_S) as client:
        request = client.build_request("GET", f"https://localhost:{port}/words")
        answers = [await client.send(request, stream=True) for _ in range(NUM_STREAMS)]
        readers = [answer.aiter_raw() for answer in answers]
        assert [await anext(reader) for reader in readers] == [b"one "] * NUM_STREAMS
        yield readers
        for answer in answers:
            await answer.aclose()


async def test_http_takes_tls_alone_and_strangers_disturb_nobody(folder: Path):
    async with (
        site(tls(folder).pem()) as place,
        open_streams(port := place.bounds.port) as readers,
    ):
        for _ in range(4):
            with pytest.raises(httpx.RemoteProtocolError):
                await httpx.AsyncClient().get(f"http://localhost:{port}/")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await httpx.AsyncClient().get(f"https://localhost:{port}/")
        old = trusting()
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((httpx.ConnectError, ssl.SSLError)):
            await httpx.AsyncClient(verify=old).get(f"https://localhost:{port}/")
        place.application.may_answer.set()
        assert [await anext(reader) for reader in readers] == [b"two"] * NUM_STREAMS


async def test_a_certificate_is_replaced_under_open_http_streams(folder: Path):
    successor = Authority.new("its successor")
    async with (
        site(tls(folder).pem()) as place,
        open_streams(port := place.bounds.port) as readers,
    ):
        successor.write(folder, "localhost")
        async with httpx.AsyncClient(verify=trusting(successor)) as fresh:
            assert (await fresh.get(f"https://localhost:{port}/")).text == "here"
        place.application.may_answer.set()
        assert [await anext(reader) for reader in readers] == [b"two"] * NUM_STREAMS


async def test_grpc_takes_tls_alone_and_follows_a_replaced_certificate(
    folder: Path, llama_folder: Path
):
    where = GrpcConfig(port=free_port())
    config = replace(tiny_config(llama_folder), grpc=where, tls=tls(folder))
    ingress = Ingress(config, Tokenizer.load(llama_folder), SamplingParams(max_tokens=0), Nowhere())
    listener = GrpcListener(ingress, 1.0)
    await listener.start()
    address = f"localhost:{where.port}"

    def channel(authority: Authority) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(authority.cert)
        own = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(address, credentials, options=own)

    waiting = health_pb2.HealthCheckResponse.NOT_SERVING
    async with AsyncExitStack() as stack:
        stack.push_async_callback(listener.stop)
        watches = []
        for _ in range(NUM_STREAMS):
            client = await stack.enter_async_context(channel(AUTHORITY))
            watches.append(health_pb2_grpc.HealthStub(client).Watch(WHOLE))
            assert (await watches[-1].read()).status == waiting
        plain = await stack.enter_async_context(
            grpc.aio.insecure_channel(f"localhost:{where.port}")
        )
        stranger = await stack.enter_async_context(channel(Authority.new("nobody's")))
        for each in (plain, stranger):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health_pb2_grpc.HealthStub(each).Check(WHOLE)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        successor = Authority.new("its successor")
        successor.write(folder, "localhost")
        fresh = await stack.enter_async_context(channel(successor))
        assert (await health_pb2_grpc.HealthStub(fresh).Check(WHOLE)).status == waiting
        assert not any(watch.done() for watch in watches)
        await ingress.drain()  # a change of what they watch
        for watch in watches:
            assert await watch.code() is grpc.StatusCode.OK


async def test_start_up_asks_over_tls_how_the_server_is(folder: Path, llama_folder: Path):
    async with site(tls(folder).pem()) as place:
        config = replace(tiny_config(llama_folder), http=place.bounds, tls=tls(folder))
        url = base_url(config)
        assert url == f"https://127.0.0.1:{place.bounds.port}"
        assert (await asyncio.to_thread(health, url))["status"] == "HTTP status 404"
