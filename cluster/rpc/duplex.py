"""Reading and writing a link at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from cluster.rpc.link import Link

F = TypeVar("F")


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all concurrently; when one returns or raises, cancel the rest and keep its outcome."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Outbox(Generic[F]):
    """Sends over a link what there is to tell, without ever making anybody wait.

    Nothing is queued: a frame is built when the link can take one.
    """

    def __init__(self, link: Link[F, Any]) -> None:
        self.link = link
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """There is something to tell."""
        self._has_news.set()

    async def send_forever(self) -> None:
        """Raises WorkerError when the link is down."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send all that there is."""
        while (frame := self.next_frame()) is not None:
            await self.link.send(frame)

    def next_frame(self) -> F | None:
        """Return the next one; None = all was told."""
        raise NotImplementedError
