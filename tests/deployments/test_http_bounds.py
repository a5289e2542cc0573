"""What a client may send before a request, how slowly, and on how many connections."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.config.http import HttpConfig
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.request_scope import RequestScope
from tests.deployments.conftest import free_port

DEADLINE_S = 30.0
BRIEF_S = 0.3
ASK = b"GET / HTTP/1.1\r\nHost: a\r\n"
SLOWLY = ASK.replace(b"/ ", b"/slow ") + b"Connection: close\r\n\r\n"


class Application:
    """Answers at once, on a word, or without end."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer, self.is_left = (asyncio.Event() for _ in range(3))
        paths = {"/": self.quick, "/slow": self.slow, "/endless": self.endless}
        methods = ["GET", "POST"]
        self.app = Starlette(
            routes=[Route(path, answer, methods=methods) for path, answer in paths.items()]
        )

    async def quick(self, request: Request) -> Response:
        return PlainTextResponse("here")

    async def slow(self, request: Request) -> Response:
        self.is_asked.set()
        await self.may_answer.wait()
        return PlainTextResponse("late")

    async def endless(self, request: Request) -> Response:
        async def zeros() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(65536)
                    await asyncio.sleep(0)
            finally:
                self.is_left.set()

        return StreamingResponse(zeros())


Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Site:
    """A listener with these bounds, and its clients."""

    def __init__(self, stack: AsyncExitStack, **bounds: float) -> None:
        self.bounds = HttpConfig(port=free_port(), **bounds)  # type: ignore[arg-type]
        self.application = Application()
        self._stack = stack

    async def connect(self, data: bytes = b"") -> tuple[Reader, Writer]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.bounds.port)
        self._stack.callback(writer.close)
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """All that comes on a connection until the server closes it."""
        reader, _ = await self.connect(data)
        return await rest(reader)

    async def is_served(self) -> bool:
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            return (await client.get(f"http://127.0.0.1:{self.bounds.port}/")).text == "here"


async def rest(reader: Reader) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        data = b""
        try:
            while piece := await reader.read(65536):
                data += piece
        except ConnectionResetError:
            pass  # whoever is cut off while it sends
        return data


@asynccontextmanager
async def site(**bounds: float) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        place = Site(stack, **bounds)
        listener = HttpListener(place.application.app, place.bounds, 1.0)
        await listener.start()
        stack.push_async_callback(listener.stop)
        yield place


def check_refused(answer: bytes, status: int, reason: str) -> None:
    """An answer in OpenAI's shape, and the last on its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head
    found = json.loads(body)
    assert re.search(reason, found["error"]["message"])
    assert found["error"]["type"] in ("invalid_request_error", "server_error")


HEADS = {
    "whole": ASK + b"X: " + b"a" * 3000 + b"\r\n\r\n",
    "without an end": ASK + b"X: " + b"a" * 400_000,
    "in many headers": ASK + b"".join(b"X%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(200)),
    "a path": b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "a path without an end": b"GET /" + b"a" * 400_000,
    "headers in number": ASK + b"".join(b"X: a\r\n" for _ in range(40)) + b"\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
async def test_a_head_beyond_the_bounds_is_refused_and_others_are_served(head: bytes) -> None:
    async with site(max_header_bytes=2048, max_headers=32) as place:
        check_refused(await place.answer(head), 431, r"http\.max_header|does not end")
        assert await place.is_served()


async def test_headers_behind_a_body_count_too() -> None:
    ask = b"POST /slow HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    async with site(max_header_bytes=2048) as place:
        assert await place.answer(ask + b"X: " + b"a" * 400_000) == b""
        assert await place.answer(ask + b"".join(b"X: aaaaaaaa\r\n" for _ in range(200))) == b""
        assert await place.is_served()


async def test_a_large_body_counts_as_no_head() -> None:
    ask = ASK.replace(b"GET", b"POST") + b"Content-Length: 300000\r\n"
    async with site(max_header_bytes=2048) as place:
        answer = await place.answer(ask + b"Connection: close\r\n\r\n" + bytes(300_000))
        assert answer.startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_in_shape() -> None:
    async with site() as place:
        check_refused(
            await place.answer(b"\x16\x03\x01\x02\x00\x01\r\n\r\n"), 400, "no.* valid HTTP"
        )


async def test_a_head_that_trickles_is_refused_and_others_are_served() -> None:
    async with site(head_timeout_s=BRIEF_S) as place:
        reader, writer = await place.connect(ASK)
        answer = asyncio.create_task(rest(reader))
        while not answer.done():
            writer.write(b"X: a\r\n")
            await asyncio.sleep(0.02)
            assert await place.is_served()
        check_refused(answer.result(), 408, r"within 0\.3 s.*http\.head_timeout_s")


async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with site(head_timeout_s=BRIEF_S) as place:
        check_refused(await place.answer(b""), 408, "have not arrived")


@pytest.mark.parametrize("drop", [b"\r\n", b"x"], ids=["line breaks", "a body"])
async def test_what_trickles_after_an_answer_keeps_no_connection(drop: bytes) -> None:
    """Each byte would put off the end of an idle connection."""
    ask = ASK + (b"Content-Length: 99999\r\n\r\n" if drop == b"x" else b"\r\n")
    async with site(head_timeout_s=BRIEF_S) as place:
        reader, writer = await place.connect(ask)
        answer = asyncio.create_task(rest(reader))
        while not answer.done():
            writer.write(drop)
            await asyncio.sleep(0.02)
        assert answer.result().endswith(b"here")


async def test_an_idle_connection_is_closed() -> None:
    async with site(keep_alive_s=1) as place:
        assert (await place.answer(ASK + b"\r\n")).endswith(b"here")


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with site(head_timeout_s=0.1) as place:
        reader, _ = await place.connect(
            ASK.replace(b"/ ", b"/slow ") + b"Connection: close\r\n\r\n"
        )
        await asyncio.sleep(0.4)
        place.application.may_answer.set()
        assert (await rest(reader)).endswith(b"late")


async def test_connections_without_a_request_make_room_for_others() -> None:
    """Many that never ask (a slow loris) keep nobody out."""
    async with site(max_connections=8) as place:
        silent = [await place.connect(ASK) for _ in range(40)]
        for _ in range(10):
            assert await place.is_served()
        check_refused(await rest(silent[0][0]), 503, "8 connections are open")


async def test_one_connection_too_many_is_refused_where_all_have_a_request() -> None:
    async with site(max_connections=1) as place:
        reader, _ = await place.connect(
            ASK.replace(b"/ ", b"/slow ") + b"Connection: close\r\n\r\n"
        )
        await place.application.is_asked.wait()
        answer = await place.answer(ASK + b"\r\n")
        check_refused(answer, 503, "1 connections are open")
        assert b"retry-after: 1" in answer
        place.application.may_answer.set()
        assert (await rest(reader)).endswith(b"late")
        assert await place.is_served()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
async def test_a_client_that_never_reads_is_cut_off() -> None:
    async with site(unread_timeout_s=1) as place:
        reader, writer = await place.connect(ASK.replace(b"/ ", b"/endless ") + b"\r\n")
        await reader.readexactly(1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(DEADLINE_S):
            await place.application.is_left.wait()


async def asked(headers: dict[str, str], answer: Callable[..., Any]) -> httpx.Response:
    """An answer behind a server that bounds nothing, as Serve's proxies."""
    scope = RequestScope(answer, HttpConfig(max_header_bytes=2048), is_logged=False)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(scope)) as client:
        return await client.get("http://a/", headers=headers)


async def test_a_head_that_another_server_let_in_is_refused_as_well() -> None:
    application = Application().app
    assert (await asked({"X": "a" * 1000}, application)).text == "here"
    refused = await asked({"X": "a" * 3000}, application)
    assert refused.status_code == 431
    assert refused.json()["error"]["code"] == "headers_too_large"
