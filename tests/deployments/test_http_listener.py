"""The HTTP listener: its address, which replicas share, and its end."""

import asyncio
import re

import httpx
import pytest

from cluster.config.schema import Config, DashboardConfig, GrpcConfig, HttpConfig
from cluster.errors import WorkerError
from deployments.ingress.http_listener import HttpListener
from deployments.placement import check_free
from deployments.serve_command import ready_line
from tests.deployments.conftest import free_port, free_ports
from tests.support.deployments.site import Application
from tests.support.errors import config_error


@pytest.fixture
def where() -> HttpConfig:
    return HttpConfig(port=free_port())


def url(where: HttpConfig) -> str:
    return f"http://{where.host}:{where.port}"


async def test_replicas_of_a_node_share_the_port(where: HttpConfig):
    listeners = [HttpListener(Application(name).app, where, 1.0) for name in "ab"]
    for listener in listeners:
        await listener.start()
    answered = set()
    # Each question on a connection of its own.
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        for _ in range(64):
            answered.add((await client.get(url(where))).text)
        assert answered == {"a", "b"}
        await listeners[0].stop()
        for _ in range(16):
            assert (await client.get(url(where))).text == "b"
    await listeners[1].stop()


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_server_at_an_ipv6_address_is_found_where_the_ready_line_says(host: str):
    http, grpc = free_ports(2)
    config = Config(
        http=HttpConfig(host=host, port=http),
        grpc=GrpcConfig(host=host, port=grpc),
        dashboard=DashboardConfig(enabled=False),
    )
    check_free(config)
    listener = HttpListener(Application("here").app, config.http, 1.0)
    await listener.start()
    line = ready_line(config)
    found = re.search(r"http://\[::1\]:\d+", line)
    assert f"[::1]:{config.grpc.port} (gRPC)" in line
    async with httpx.AsyncClient() as client:
        assert (await client.get(found[0])).text == "here"
    with config_error(rf"http\.port: port {config.http.port} taken"):
        check_free(config)
    await listener.stop()


async def test_an_end_does_not_wait_for_ever(where: HttpConfig):
    slow = Application()
    listener = HttpListener(slow.app, where, 1.0)
    await listener.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = asyncio.create_task(client.get(f"{url(where)}/slow"))
        await slow.is_asked.wait()
        await asyncio.wait_for(listener.stop(), 10.0)
        with pytest.raises(httpx.HTTPError):
            (await answer).raise_for_status()


async def test_a_server_that_has_ended_is_told(where: HttpConfig):
    listener = HttpListener(Application().app, where, 1.0)
    await listener.start()
    listener.check()
    await listener.stop()
    with pytest.raises(WorkerError, match="has ended"):
        listener.check()


async def test_an_address_of_another_machine_is_refused():
    listener = HttpListener(Application().app, HttpConfig(host="192.0.2.1"), 1.0)
    with config_error(r"http: 192.0.2.1:8000 cannot be bound .*choose another"):
        await listener.start()
    await listener.stop()
