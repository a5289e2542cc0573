"""Sends an answer as server-sent events, piece by piece, for as long as its client listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import DrafthouseError
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.http_protocol import AT_ONCE, WritePiece

log = logging.getLogger(__name__)

# A comment: clients skip it.
_HEARTBEAT = b": waiting\n\n"

Result = TypeVar("Result")


class Writer(Protocol):
    """Writes one answer in the format of one endpoint: `whole`, or the other four in order."""

    def whole(self, deltas: Sequence[Delta]) -> bytes: ...

    def opening(self) -> bytes: ...

    def chunks(self, deltas: Sequence[Delta]) -> bytes: ...

    def closing(self) -> bytes: ...

    def failing(self, error: DrafthouseError) -> bytes:
        """What ends a stream instead of `closing`."""
        ...


class EventStream(Response):
    """Sends the events of an admitted generation; closes it at the end, also if cancelled."""

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        headers: Mapping[str, str],
        heartbeat_s: float,
    ) -> None:
        """heartbeat_s: after so long without an event a comment is sent; 0 = never."""
        super().__init__(
            media_type="text/event-stream",
            # Proxies must forward every event at once.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        del self.headers["content-length"]
        self._generation = generation
        self._writer = writer
        self._heartbeat_s = heartbeat_s
        self._is_quiet = True
        self._at_once: WritePiece | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._at_once = scope.get("extensions", {}).get(AT_ONCE)
        gone = asyncio.ensure_future(_until_disconnected(receive))
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            for task in (gone, sending):
                task.cancel()
            results = await asyncio.gather(gone, sending, return_exceptions=True)
        if isinstance(results[1], Exception):
            raise results[1]

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        beating = asyncio.ensure_future(self._beat(send)) if self._heartbeat_s else None
        try:
            await self._write(send, self._writer.opening())
            async for deltas in self._generation.deltas():
                await self._write(send, self._writer.chunks(deltas))
            await self._write(send, self._writer.closing())
        except DrafthouseError as error:
            log.warning("stream id=%s ended with an error: %s", self._generation.id, error.code)
            await self._write(send, self._writer.failing(error))
        finally:
            if beating is not None:
                beating.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        if not body:
            return
        self._is_quiet = False
        if self._at_once is None or not self._at_once(body):
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _beat(self, send: Send) -> None:
        # Looks from time to time, so that an event costs no timer.
        while True:
            self._is_quiet = True
            await asyncio.sleep(self._heartbeat_s)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": _HEARTBEAT, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; ClientDisconnect, and the end of the work, when the client goes away.

    receive: of a request whose body has been read.
    """
    gone = asyncio.ensure_future(_until_disconnected(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (gone, working):
            task.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
