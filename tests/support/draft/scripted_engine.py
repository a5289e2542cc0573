"""An engine of OpenAI's kind in a thread of the test's own process; the test writes its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 60.0

Pieces = AsyncGenerator[bytes, None]
# What it sends for a request, head included, in pieces.
Script = Callable[[dict[str, Any]], Pieces]


def head(status: str = "200 OK", *lines: str) -> bytes:
    given = (f"HTTP/1.1 {status}", "Content-Type: text/event-stream", "Connection: close", *lines)
    return "\r\n".join((*given, "", "")).encode()


def event(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def says(*texts: str, reason: str | None = "length") -> Script:
    """The same answer to every request."""

    async def script(body: dict[str, Any]) -> Pieces:
        yield head()
        for text in texts:
            yield event(text)
        yield event("", reason) + b"data: [DONE]\n\n"

    return script


def sends(*pieces: bytes) -> Script:
    """These bytes to every request."""

    async def script(body: dict[str, Any]) -> Pieces:
        for piece in pieces:
            yield piece

    return script


def continues(whole: str, piece_len: int = 7) -> Script:
    """How `whole` goes on behind the prompt, as many characters as tokens are asked for; nonsense
    for another prompt."""

    async def script(body: dict[str, Any]) -> Pieces:
        prompt, most = body["prompt"], body["max_tokens"]
        rest = whole[len(prompt) :][:most] if whole.startswith(prompt) else "?" * most
        yield head()
        for start in range(0, len(rest), piece_len):
            yield event(rest[start : start + piece_len])
        yield event("", "length")

    return script


class Gate:
    """Scripts wait here until the test lets them through."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._loop = engine.loop
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)


class ScriptedEngine:
    """script: of the requests to come.  requests: bodies so far.  heads: their heads.

    num_left: connections that their client has closed before the answer ended."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_left = 0
        self.loop = asyncio.new_event_loop()
        self.url = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    @property
    def prompts(self) -> list[str]:
        return [body["prompt"] for body in self.requests]

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something that it counts is so."""
        with self._changed:
            assert self._changed.wait_for(is_so, PATIENCE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:  # it was given up before it asked
            writer.close()
            return
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        script = self.script
        with self._changed:
            self.heads.append(head)
            self.requests.append(body)
            self._changed.notify_all()
        gone = asyncio.ensure_future(reader.read())  # ends when the client closes
        sending = asyncio.ensure_future(self._send(script(body), writer))
        await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            with self._changed:
                self.num_left += 1
                self._changed.notify_all()
        for task in (gone, sending):
            task.cancel()
        await asyncio.gather(gone, sending, return_exceptions=True)
        writer.close()

    async def _send(self, pieces: Pieces, writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()

    async def _open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def scripted(script: Script) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(script)
    engine._thread.start()
    server = asyncio.run_coroutine_threadsafe(engine._open(), engine.loop).result(PATIENCE_S)
    try:
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine._close(server), engine.loop).result(PATIENCE_S)
        engine.loop.call_soon_threadsafe(engine.loop.stop)
        engine._thread.join(PATIENCE_S)
        engine.loop.close()
