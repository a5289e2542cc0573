"""A link within one process and event loop, made of two mailboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

from cluster.errors import WorkerError
from cluster.rpc.mailbox import DEFAULT_WINDOW, Mailbox

S = TypeVar("S")
R = TypeVar("R")


class MemoryLink(Generic[S, R]):
    """One end of an in-process link.  Messages are passed by reference.

    Frames are immutable by contract, so nothing is copied.  Both ends use one event loop.
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
        """Close both directions cleanly: the peer still reads messages sent before."""
        self._outbox.close()
        self._inbox.close()
        self._inbox.clear()

    def sever(self) -> None:
        """Break the link like a lost connection: both ends raise WorkerError."""
        error = WorkerError("the connection was lost; the same work may succeed elsewhere")
        self._outbox.fail(error)
        self._inbox.fail(error)


def memory_pair(window: int = DEFAULT_WINDOW) -> tuple[MemoryLink[Any, Any], MemoryLink[Any, Any]]:
    """Both ends of a new in-process link: what the first sends, the second receives.

    window: unread messages per direction before send waits.
    """
    there: Mailbox[Any] = Mailbox(window)
    back: Mailbox[Any] = Mailbox(window)
    return MemoryLink(there, back), MemoryLink(back, there)
