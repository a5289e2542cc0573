"""A bounded queue that can be closed or broken; every link consists of two."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from cluster.errors import DrafthouseError, WorkerError

T = TypeVar("T")

# Frames in flight per direction.  A round has one frame per peer, so a slow peer may fall many
# rounds behind, and a peer that hangs still costs little memory.
DEFAULT_WINDOW = 64


class Mailbox(Generic[T]):
    """Passes messages from producers to a consumer on the same event loop, in order.

    put waits while `window` messages are unread.  After close the consumer reads the remaining
    messages and then ends; after fail it reads them and then raises the error.  put raises in both
    cases.
    """

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; a mailbox holds at least one message")
        self._window = window
        self._messages: deque[T] = deque()
        self._error: DrafthouseError | None = None
        self._closed = False
        self._arrived = asyncio.Event()
        self._has_space = asyncio.Event()
        self._has_space.set()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_closed(self) -> bool:
        """True after close or fail: put raises."""
        return self._closed

    async def put(self, message: T) -> None:
        """Add a message, waiting for space; raises the failure, or WorkerError when closed."""
        while not self._closed and len(self._messages) >= self._window:
            await self._has_space.wait()
        if self._closed:
            raise self._error or WorkerError("the link is closed; open a new one")
        self._messages.append(message)
        self._arrived.set()
        if len(self._messages) >= self._window:
            self._has_space.clear()

    async def get(self) -> T:
        """The oldest message; raises StopAsyncIteration at the end, or the failure."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        self._has_space.set()
        return message

    def close(self) -> None:
        """No more messages will come; idempotent, and without effect after fail."""
        self._closed = True
        # Wakes up both the producers and the consumer.
        self._arrived.set()
        self._has_space.set()

    def fail(self, error: DrafthouseError) -> None:
        """Like close, but the consumer and later producers raise `error`."""
        if not self._closed:
            self._error = error
        self.close()

    def clear(self) -> None:
        """Drop unread messages, because the consumer has left."""
        self._messages.clear()
        self._has_space.set()
