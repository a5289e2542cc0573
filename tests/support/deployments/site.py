"""A listener of its own in front of a small application, and its clients, byte by byte."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.config.doors import HttpConfig
from cluster.config.pem import Pem, Reloaded
from deployments.ingress.http_listener import HttpListener
from deployments.ingress.request_scope import RequestScope
from tests.deployments.conftest import free_port

DEADLINE_S = 30.0
ASK = b"GET / HTTP/1.1\r\nHost: a\r\n"


class Application:
    """Answers at once, on a word, or without end."""

    def __init__(self, name: str = "here") -> None:
        self._name = name
        self.is_asked, self.may_answer, self.is_left = (asyncio.Event() for _ in range(3))
        answers = (self.quick, self.slow, self.endless, self.echo, self.words)
        paths = {f"/{answer.__name__}": answer for answer in answers} | {"/": self.quick}
        methods = ["GET", "POST"]
        self.app = Starlette(
            routes=[Route(path, answer, methods=methods) for path, answer in paths.items()]
        )

    async def quick(self, request: Request) -> Response:
        return PlainTextResponse(self._name)

    async def echo(self, request: Request) -> Response:
        self.is_asked.set()
        try:
            return PlainTextResponse(await request.body())
        except ClientDisconnect:
            self.is_left.set()
            raise

    async def words(self, request: Request) -> Response:
        """A stream of two pieces: the second comes on a word."""

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"one "
                await self.may_answer.wait()
                yield b"two"
            finally:
                self.is_left.set()

        return StreamingResponse(pieces())

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

    def __init__(self, stack: AsyncExitStack, bounds: dict[str, float]) -> None:
        self.bounds = HttpConfig(port=free_port(), **bounds)
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
        async with httpx.AsyncClient(timeout=DEADLINE_S, verify=False) as client:
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
async def site(tls: Reloaded[Pem] | None = None, **bounds: float) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        place = Site(stack, bounds)
        app = RequestScope(place.application.app, is_logged=False)
        listener = HttpListener(app, place.bounds, 1.0, tls)
        await listener.start()
        stack.push_async_callback(listener.stop)
        yield place


def check_refused(answer: bytes, status: int, reason: str) -> None:
    """An answer in OpenAI's shape, and the last on its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"\r\nconnection: close" in head
    found = json.loads(body)
    assert re.search(reason, found["error"]["message"])
    assert found["error"]["type"] in ("invalid_request_error", "server_error")
