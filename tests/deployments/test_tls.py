"""TLS of the ingress' own listeners: clients, strangers to it, and a replaced certificate."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.pem import TlsConfig
from cluster.config.schema import Config, GrpcConfig
from deployments.ingress.grpc_api import GrpcListener
from deployments.readiness import base_url
from tests.deployments.conftest import free_port
from tests.support.deployments.site import Site, site
from tests.support.deployments.stage import toys_ingress
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
async def streaming(folder: Path) -> AsyncIterator[Site]:
    """A site with streams on connections of their own, which go on whatever happens inside."""
    limits = httpx.Limits(max_connections=None)
    async with (
        site(tls(folder).pem()) as place,
        httpx.AsyncClient(verify=trusting(), limits=limits, timeout=PATIENCE_S) as client,
    ):
        request = client.build_request("GET", f"https://localhost:{place.bounds.port}/words")
        answers = [await client.send(request, stream=True) for _ in range(NUM_STREAMS)]
        readers = [answer.aiter_raw() for answer in answers]
        assert [await anext(reader) for reader in readers] == [b"one "] * NUM_STREAMS
        yield place
        place.application.may_answer.set()
        assert [await anext(reader) for reader in readers] == [b"two"] * NUM_STREAMS
        for answer in answers:
            await answer.aclose()


async def test_http_takes_tls_alone_and_strangers_disturb_nobody(folder: Path):
    async with streaming(folder) as place:
        there = f"localhost:{place.bounds.port}/"
        for _ in range(4):
            with pytest.raises(httpx.RemoteProtocolError):
                await httpx.AsyncClient().get(f"http://{there}")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await httpx.AsyncClient().get(f"https://{there}")
        old = trusting()
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
        with pytest.raises((httpx.ConnectError, ssl.SSLError)):
            await httpx.AsyncClient(verify=old).get(f"https://{there}")


async def test_a_certificate_is_replaced_under_open_http_streams(folder: Path):
    successor = Authority.new("its successor")
    async with streaming(folder) as place:
        successor.write(folder, "localhost")
        async with httpx.AsyncClient(verify=trusting(successor)) as fresh:
            answer = await fresh.get(f"https://localhost:{place.bounds.port}/")
        assert answer.text == "here"


async def test_grpc_takes_tls_alone_and_follows_a_replaced_certificate(folder: Path):
    where = GrpcConfig(port=free_port())
    ingress = toys_ingress(Config(grpc=where, tls=tls(folder)))
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
        plain = await stack.enter_async_context(grpc.aio.insecure_channel(address))
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


async def test_the_url_that_start_up_says_is_served_over_tls(folder: Path):
    async with site(tls(folder).pem()) as place, httpx.AsyncClient(verify=False) as client:
        config = Config(http=place.bounds, tls=tls(folder))
        url = base_url(config)
        assert url == f"https://127.0.0.1:{place.bounds.port}"
        assert (await client.get(f"{url}/health")).status_code == 404
