"""The ingress' own HTTP port, and Serve's proxy in its place."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.config.schema import Config, DashboardConfig, GrpcConfig, HttpConfig
from cluster.errors import ConfigError, WorkerError
from deployments.ingress.http_listener import HttpListener
from deployments.ports import check_free
from deployments.readiness import health
from deployments.serve_command import ready_line
from tests.deployments.conftest import MODEL, Served, free_port
from tests.support.deployments.api import Api
from tests.support.deployments.site import Application


@dataclass
class Answering:
    """released: lets the answer go."""

    listener: HttpListener
    released: asyncio.Event
    answer: asyncio.Task[httpx.Response]


@pytest.fixture
def where() -> HttpConfig:
    return HttpConfig(port=free_port())


def url(where: HttpConfig) -> str:
    return f"http://{where.host}:{where.port}"


async def test_replicas_of_a_node_share_the_port(where: HttpConfig) -> None:
    listeners = [HttpListener(Application(name).app, where, 1.0) for name in "ab"]
    for listener in listeners:
        await listener.start()
    answered = set()
    for _ in range(64):  # each on a connection of its own
        async with httpx.AsyncClient() as client:
            answered.add((await client.get(url(where))).text)
    assert answered == {"a", "b"}
    await listeners[0].stop()
    for _ in range(16):
        async with httpx.AsyncClient() as client:
            assert (await client.get(url(where))).text == "b"
    await listeners[1].stop()


@pytest.mark.parametrize("host", ["::1", "::"])
async def test_a_server_at_an_ipv6_address_is_found_where_the_ready_line_says(host: str) -> None:
    config = Config(
        http=HttpConfig(host=host, port=free_port()),
        grpc=GrpcConfig(host=host, port=free_port()),
        dashboard=DashboardConfig(enabled=False),
    )
    check_free(config)
    listener = HttpListener(Application("here").app, config.http, 1.0)
    await listener.start()
    line = ready_line(config)
    found = re.search(r"http://\[::1\]:\d+", line)
    assert found is not None
    assert f"[::1]:{config.grpc.port} (gRPC)" in line
    async with httpx.AsyncClient() as client:
        assert (await client.get(found[0])).text == "here"
    assert await asyncio.to_thread(health, found[0]) == {"status": "HTTP status 404"}
    with pytest.raises(ConfigError, match=rf"http\.port: port {config.http.port} taken"):
        check_free(config)
    await listener.stop()


@asynccontextmanager
async def answering(where: HttpConfig, drain_s: float) -> AsyncIterator[Answering]:
    """A listener with one answer under way."""
    slow = Application()
    listener = HttpListener(slow.app, where, drain_s)
    await listener.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = asyncio.create_task(client.get(f"{url(where)}/slow"))
        await slow.is_asked.wait()
        yield Answering(listener, slow.may_answer, answer)


async def test_an_end_does_not_wait_for_ever(where: HttpConfig) -> None:
    async with answering(where, 1.0) as under_way:
        await asyncio.wait_for(under_way.listener.stop(), 10.0)
        with pytest.raises(httpx.HTTPError):
            (await under_way.answer).raise_for_status()


async def test_a_server_that_has_ended_is_told(where: HttpConfig) -> None:
    listener = HttpListener(Application().app, where, 1.0)
    await listener.start()
    listener.check()
    await listener.stop()
    with pytest.raises(WorkerError, match="has ended"):
        listener.check()


async def test_an_address_of_another_machine_is_refused() -> None:
    listener = HttpListener(Application().app, HttpConfig(host="192.0.2.1"), 1.0)
    with pytest.raises(
        ConfigError, match=r"http: 192.0.2.1:8000 cannot be bound .*\.listener: serve"
    ):
        await listener.start()
    await listener.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_both_ways_in_lead_to_the_same_text(served: Served, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 24, "seed": 7, "stream": stream}
    texts = [text_at(base, body) for base in (served.http, served.proxied)]
    assert texts[0] == texts[1] != ""


def test_both_ways_in_refuse_a_large_head(served: Served) -> None:
    for base in (served.http, served.proxied):
        reply = httpx.get(f"{base}/v1/models", headers={"X": "a" * 40_000}, timeout=60)
        assert (reply.status_code, reply.json()["error"]["code"]) == (431, "headers_too_large")
        assert httpx.get(f"{base}/v1/models", timeout=60).status_code == 200


def raw_answer(base: str, request: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    url = httpx.URL(base)
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def request_of(body: bytes, version: str = "1.1", **headers: str) -> bytes:
    named = {"Content-Length": len(body), "Host": "localhost", "Connection": "close", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items()]
    head = "\r\n".join([f"POST /v1/completions HTTP/{version}", *lines, "", ""])
    return head.encode() + body


SHORT = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "seed": 7}


def test_both_ways_in_unpack_a_body_and_refuse_a_coding_that_nobody_knows(served: Served) -> None:
    plain = json.dumps(SHORT).encode()
    wanted = text_at(served.http, {**SHORT, "stream": False})
    for base in (served.http, served.proxied):
        answer = raw_answer(base, request_of(gzip.compress(plain), Content_Encoding="gzip"))
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == wanted
        answer = raw_answer(base, request_of(plain, Content_Encoding="br"))
        assert b" 415 " in answer
        assert b"accept-encoding: gzip, deflate, zstd" in answer
        for coding in (b"xyz", b"gzip, chunked"):
            ask = request_of(b"0\r\n\r\n").replace(
                b"Content-Length: 5", b"Transfer-Encoding: " + coding
            )
            assert b" 400 " in raw_answer(base, ask)[:20]


def test_both_ways_in_send_no_chunks_to_an_old_client(served: Served) -> None:
    body = json.dumps({**SHORT, "stream": True}).encode()
    for base in (served.http, served.proxied):
        head, _, events = raw_answer(base, request_of(body, "1.0")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in head.lower()
        assert events.startswith(b"data: {")
        assert events.endswith(b"data: [DONE]\n\n")


def test_an_offer_of_http_2_costs_no_body_and_a_proxy_that_loses_it_says_so(served: Served) -> None:
    body = json.dumps(SHORT).encode()
    ask = request_of(body, Connection="Upgrade, HTTP2-Settings, close", Upgrade="h2c")
    answer = raw_answer(served.http, ask)
    wanted = text_at(served.http, {**SHORT, "stream": False})
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == wanted
    answer = raw_answer(served.proxied, ask)
    assert b" 400 " in answer[:20]
    assert b"without the header Upgrade" in answer


def text_at(base: str, body: dict[str, Any]) -> str:
    api = Api(base)
    if not body["stream"]:
        return str(api.complete(**body)["text"])
    chunks = api.stream("/v1/completions", **body)
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
