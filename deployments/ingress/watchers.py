"""`/ui/events`: those who watch the cluster, and the events of all coordinators in one stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import DrafthouseError, UnavailableError
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.draining import Draining
from deployments.ingress.event_stream import while_connected

log = logging.getLogger(__name__)

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


class WatchStream(Response):
    """Sends the events to one watcher until it leaves."""

    def __init__(self, watchers: Watchers) -> None:
        super().__init__(
            media_type="text/event-stream",
            # Proxies must forward every event at once.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        async with contextlib.aclosing(self._watchers.events()) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
