"""Events of one request as an asynchronous iterator, for callers in the same process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from cluster.core import TokenEvent


class EventStream:
    """A queue of events that ends after the finished one."""

    def __init__(self) -> None:
        self._events: deque[TokenEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if event.finish_reason is not None:
                    return
            self._arrived.clear()
            await self._arrived.wait()
