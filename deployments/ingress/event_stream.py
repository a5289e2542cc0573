"""Sends an answer as server-sent events, piece by piece, for as long as its client listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import DrafthouseError, UnavailableError
from deployments.ingress.api.writer import Writer
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.draining import Draining
from deployments.ingress.generation import Generation
from deployments.ingress.http_protocol import AT_ONCE, WritePiece

log = logging.getLogger(__name__)

# A comment: clients skip it.
_HEARTBEAT = b": waiting\n\n"

Result = TypeVar("Result")


class _Stream(Response):
    """Events of any number."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        # Proxies must forward every event at once.
        super().__init__(
            media_type="text/event-stream", headers={"X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]

    async def _start(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})


class EventStream(_Stream):
    """Sends the events of an admitted generation; closes it at the end, also if cancelled."""

    def __init__(
        self,
        generation: Generation,
        writer: Writer[Any],
        headers: Mapping[str, str],
        heartbeat_s: float,
    ) -> None:
        """heartbeat_s: after so long without an event a comment is sent; 0 = never."""
        super().__init__({"Cache-Control": "no-cache", **headers})
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
        await self._start(send)
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


# Of one ingress.  Each has a stream of its own from every coordinator.
MAX_WATCHERS = 8
# A comment: it says at once that the stream is there.
_OPENING = b": watching\n\n"


class Watched(Protocol):
    """A coordinator, as far as it can be watched."""

    def watch(self) -> AsyncGenerator[tuple[str, str], None]: ...


News = asyncio.Queue[bytes | None]


class Watchers:
    """All of one ingress."""

    def __init__(
        self, links: Mapping[str, Watched], coordinators: Coordinators, draining: Draining
    ) -> None:
        """links: to the coordinators that are connected now."""
        self._links = links
        self._coordinators = coordinators
        self._draining = draining
        self._num_streams = 0

    def stream(self) -> WatchStream:
        """Return the answer to one more; raises UnavailableError where there are enough."""
        if self._draining.has_begun:
            raise UnavailableError("the server is stopping; watch it again in a moment")
        if self._num_streams >= MAX_WATCHERS:
            raise UnavailableError(
                f"{self._num_streams} watch already, which is the most; close another page first"
            )
        return WatchStream(self)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield every coordinator's events until the server stops.

        A watcher who reads slowly holds up the coordinators' streams, which then leave out steps.
        """
        news: News = asyncio.Queue(1)
        self._num_streams += 1
        following = asyncio.create_task(self._follow(news), name="follow the coordinators")
        try:
            yield _OPENING
            while (event := await news.get()) is not None:
                yield event
        finally:
            self._num_streams -= 1
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, news: News) -> None:
        readings: dict[Watched, asyncio.Task[None]] = {}
        try:
            while not self._draining.has_begun:
                changed = self._coordinators.next_change()
                for link in self._links.values():
                    if link not in readings:
                        readings[link] = asyncio.create_task(_read(link, news))
                await changed.wait()
            await news.put(None)
        finally:
            for reading in readings.values():
                reading.cancel()
            await asyncio.gather(*readings.values(), return_exceptions=True)


async def _read(link: Watched, news: News) -> None:
    """Pass on a coordinator's events until it is gone."""
    try:
        async with contextlib.aclosing(link.watch()) as events:
            async for name, told in events:
                await news.put(f"event: {name}\ndata: {told}\n\n".encode())
    except DrafthouseError as error:
        log.info("a coordinator is not watched any more: %s", error.message)


class WatchStream(_Stream):
    """Sends the events to one watcher until it leaves."""

    def __init__(self, watchers: Watchers) -> None:
        super().__init__({"Cache-Control": "no-store"})
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await self._start(send)
        async with contextlib.aclosing(self._watchers.events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
