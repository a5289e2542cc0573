"""Links: open bidirectional streams of messages, over gRPC or in process, and their two ends.

Who uses a link does not see whether it is a gRPC stream or in process, so the coordinator and the
workers do not depend on the transport, and tests can drop, delay and reorder frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from cluster.errors import DrafthouseError, WorkerError

S = TypeVar("S")
R = TypeVar("R")


# A bounded queue that can be closed or broken; every link consists of two.


# Frames in flight per direction.  A round has one frame per peer, so a slow peer may fall many
# rounds behind, and a peer that hangs still costs little memory.
DEFAULT_WINDOW = 64


class Mailbox(Generic[S]):
    """Passes messages from producers to a consumer on the same event loop, in order.

    put waits while `window` messages are unread.  After close the consumer reads the remaining
    messages and then ends; after fail it reads them and then raises the error.  is_closed: after
    both, when put raises.
    """

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        """window: at least 1."""
        self._window = window
        self._messages: deque[S] = deque()
        self._error: DrafthouseError | None = None
        self.is_closed = False
        self._arrived = asyncio.Event()
        self._has_space = asyncio.Event()

    async def put(self, message: S) -> None:
        """Add a message, waiting for space; raises the failure, or WorkerError when closed."""
        while not self.is_closed and len(self._messages) >= self._window:
            self._has_space.clear()
            await self._has_space.wait()
        if self.is_closed:
            raise self._error or WorkerError("the link is closed; open a new one")
        self._messages.append(message)
        self._arrived.set()

    async def get(self) -> S:
        """The oldest message; raises StopAsyncIteration at the end, or the failure."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self.is_closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        self._has_space.set()
        return message

    def close(self) -> None:
        """No more messages will come; idempotent, and without effect after fail."""
        self.is_closed = True
        # Wakes up both the producers and the consumer.
        self._arrived.set()
        self._has_space.set()

    def fail(self, error: DrafthouseError) -> None:
        """Like close, but the consumer and later producers raise `error`."""
        if not self.is_closed:
            self._error = error
        self.close()

    def clear(self) -> None:
        """Drop unread messages, because the consumer has left."""
        self._messages.clear()
        self._has_space.set()


# A link is two mailboxes; within one process and event loop it is nothing else.


class Link(Generic[S, R]):
    """One end of a bidirectional stream; in process, the peer has the same mailboxes the other way
    round, and messages are passed by reference: frames are immutable by contract, so nothing is
    copied.

    Iteration ends when the peer closes cleanly, and raises WorkerError when the link breaks.
    """

    def __init__(self, outbox: Mailbox[S], inbox: Mailbox[R]) -> None:
        self._outbox = outbox
        self._inbox = inbox

    async def send(self, message: S) -> None:
        """Send `message`; waits while the peer's window is full; raises WorkerError if down."""
        await self._outbox.put(message)

    def __aiter__(self) -> AsyncIterator[R]:
        return self

    async def __anext__(self) -> R:
        return await self._inbox.get()

    async def close(self) -> None:
        """Close both directions cleanly: the peer still reads messages sent before; idempotent."""
        self._outbox.close()
        self._inbox.close()
        self._inbox.clear()

    def sever(self, error: DrafthouseError | None = None) -> None:
        """Break the link: both directions raise the error, None = that of a lost connection."""
        error = error or WorkerError("the connection was lost; the same work may succeed elsewhere")
        self._outbox.fail(error)
        self._inbox.fail(error)


def memory_pair(window: int = DEFAULT_WINDOW) -> tuple[Link[Any, Any], Link[Any, Any]]:
    """Both ends of a new in-process link: what the first sends, the second receives.

    window: unread messages per direction before send waits.
    """
    there: Mailbox[Any] = Mailbox(window)
    back: Mailbox[Any] = Mailbox(window)
    return Link(there, back), Link(back, there)


# Reading and writing a link at the same time.


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all concurrently; when one returns or raises, cancel the rest and keep its outcome."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks(*tasks)


class Outbox(Generic[S]):
    """Sends over a link what there is to tell, without ever making anybody wait.

    Nothing is queued: a frame is built when the link can take one.
    """

    def __init__(self, link: Link[S, Any]) -> None:
        self.link = link
        self._has_news = asyncio.Event()
        self._is_over = False

    def end(self) -> None:
        """There will be nothing else to tell."""
        self._is_over = True
        self.wake()

    def wake(self) -> None:
        """There is something to tell."""
        self._has_news.set()

    async def send_forever(self) -> None:
        """Send until `end`; raises WorkerError when the link is down."""
        while not self._is_over:
            await self._has_news.wait()
            self._has_news.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send all that there is."""
        while (frame := self.next_frame()) is not None:
            await self.link.send(frame)

    def next_frame(self) -> S | None:
        """Return the next one; None = all was told."""
        raise NotImplementedError
