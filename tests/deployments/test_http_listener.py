"""The ingress' own HTTP port, and Serve's proxy in its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cluster.config.schema import HttpConfig
from cluster.errors import ConfigError, WorkerError
from deployments.ingress.http_listener import HttpListener
from tests.deployments.conftest import MODEL, Served, free_port


class Slow:
    """An application whose answers come when they are let go."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        self.app = Starlette(routes=[Route("/", self.quick), Route("/slow", self.slow)])

    async def quick(self, request: Request) -> Response:
        return PlainTextResponse(self.name)

    async def slow(self, request: Request) -> Response:
        self.asked.set()
        await self.released.wait()
        return PlainTextResponse("late")


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
    listeners = [HttpListener(Slow(name).app, where, 1.0) for name in "ab"]
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


@asynccontextmanager
async def answering(where: HttpConfig, drain_s: float) -> AsyncIterator[Answering]:
    """A listener with one answer under way."""
    slow = Slow()
    listener = HttpListener(slow.app, where, drain_s)
    await listener.start()
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = asyncio.create_task(client.get(f"{url(where)}/slow"))
        await slow.asked.wait()
        yield Answering(listener, slow.released, answer)


async def test_an_end_waits_for_answers_that_are_under_way(where: HttpConfig) -> None:
    async with answering(where, 60.0) as under_way:
        stopping = asyncio.create_task(under_way.listener.stop())
        await asyncio.sleep(0.3)
        assert not stopping.done()
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(url(where))
        under_way.released.set()
        assert (await under_way.answer).text == "late"
    await asyncio.wait_for(stopping, 10.0)


async def test_an_end_does_not_wait_for_ever(where: HttpConfig) -> None:
    async with answering(where, 1.0) as under_way:
        await asyncio.wait_for(under_way.listener.stop(), 10.0)
        with pytest.raises(httpx.HTTPError):
            (await under_way.answer).raise_for_status()


async def test_a_server_that_has_ended_is_told(where: HttpConfig) -> None:
    listener = HttpListener(Slow().app, where, 1.0)
    await listener.start()
    listener.check()
    await listener.stop()
    with pytest.raises(WorkerError, match="has ended"):
        listener.check()


async def test_an_address_of_another_machine_is_refused() -> None:
    listener = HttpListener(Slow().app, HttpConfig(host="192.0.2.1"), 1.0)
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


def text_at(base: str, body: dict[str, Any]) -> str:
    reply = httpx.post(f"{base}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200
    if not body["stream"]:
        return str(reply.json()["choices"][0]["text"])
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_a_grammar_is_checked_and_kept_through_both_ways_in(served: Served) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 8}
    for base in (served.http, served.proxied):
        good = body | {"structured_outputs": {"choice": ["ab", "ba"]}}
        assert text_at(base, {**good, "stream": False}) in ("ab", "ba")
        bad = body | {"structured_outputs": {"regex": "(a"}}
        reply = httpx.post(f"{base}/v1/completions", json=bad, timeout=60)
        assert reply.status_code == 400
        assert "the grammar cannot be used" in reply.json()["error"]["message"]
