"""Sends an answer as server-sent events, piece by piece, for as long as its client listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import DrafthouseError, UnavailableError
from cluster.rpc.channel import CoordinatorLink
from cluster.rpc.link import end_tasks, run_until_first_ends
from deployments.ingress.api.writer import Writer
from deployments.ingress.body import hidden
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation

log = logging.getLogger(__name__)

# A comment: clients skip it.
_HEARTBEAT = b": waiting\n\n"

Result = TypeVar("Result")


Events = AsyncGenerator[bytes, None]


class EventStream(StreamingResponse):
    """Sends events to a client until they end or it leaves."""

    def __init__(
        self,
        events: Events,
        headers: Mapping[str, str],
        heartbeat_s: float = 0.0,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """heartbeat_s: after so long without an event a comment is sent; 0 = never.  on_end: called
        at the end, also if it is cancelled."""
        # Proxies must forward every event at once.
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._heartbeat_s = heartbeat_s
        self._on_end = on_end
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message.get("body"):
                self._is_quiet = False
            await send(message)

        beating = asyncio.ensure_future(self._beat(send))
        try:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, noted)
        finally:
            beating.cancel()
            self._on_end()

    async def _beat(self, send: Send) -> None:
        # Looks from time to time, so that an event costs no timer.
        while self._heartbeat_s:
            self._is_quiet = True
            await asyncio.sleep(self._heartbeat_s)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": _HEARTBEAT, "more_body": True})


async def answered(generation: Generation, writer: Writer) -> Events:
    """Yield the events of an admitted generation."""
    try:
        yield writer.opening()
        async for deltas in generation.deltas():
            yield writer.chunks(deltas)
        yield writer.closing()
    except Exception as error:  # noqa: BLE001
        told = hidden(error, generation.id)
        log.warning("stream id=%s ended with an error: %s", generation.id, told.code)
        yield writer.failing(told)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` gives; ClientDisconnect, and the end of the work, when the client goes away.

    receive: of a request whose body has been read.
    """
    found: list[Result] = []

    async def working() -> None:
        found.append(await work)

    await run_until_first_ends(_until_disconnected(receive), working())
    if not found:
        raise ClientDisconnect
    return found[0]


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Of one ingress.  Each has a stream of its own from every coordinator.
MAX_WATCHERS = 8


News = asyncio.Queue[bytes | None]


@dataclass(slots=True)
class Watchers:
    """All of one ingress."""

    _coordinators: Coordinators
    _num_streams: int = 0

    def stream(self) -> EventStream:
        """Return the answer to one more; raises UnavailableError where there are enough."""
        if self._coordinators.is_stopping:
            raise UnavailableError("the server is stopping; watch it again in a moment")
        if self._num_streams >= MAX_WATCHERS:
            raise UnavailableError(
                f"{self._num_streams} watch already, which is the most; close another page first"
            )
        return EventStream(self.events(), {"Cache-Control": "no-store"})

    async def events(self) -> Events:
        """Yield every coordinator's events until the server stops.

        A watcher who reads slowly holds up the coordinators' streams, which then leave out steps.
        """
        news: News = asyncio.Queue(1)
        self._num_streams += 1
        following = asyncio.create_task(self._follow(news), name="follow the coordinators")
        try:
            yield b": watching\n\n"  # a comment: it says at once that the stream is there
            while (event := await news.get()) is not None:
                yield event
        finally:
            self._num_streams -= 1
            await end_tasks(following)

    async def _follow(self, news: News) -> None:
        readings: dict[CoordinatorLink, asyncio.Task[None]] = {}
        try:
            async for _ in self._coordinators.changes():
                for link in self._coordinators.links.values():
                    if link not in readings:
                        readings[link] = asyncio.create_task(_read(link, news))
            await news.put(None)
        finally:
            await end_tasks(*readings.values())


async def _read(link: CoordinatorLink, news: News) -> None:
    """Pass on a coordinator's events until it is gone."""
    try:
        async with contextlib.aclosing(link.watch()) as events:
            async for name, told in events:
                await news.put(f"event: {name}\ndata: {told}\n\n".encode())
    except DrafthouseError as error:
        log.info("a coordinator is not watched any more: %s", error.message)
