"""A bounded queue that can be closed or broken: what every link is made of."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from cluster.errors import DrafthouseError, WorkerError

T = TypeVar("T")

# Frames in flight per direction.  A round has one frame per peer, so this is many rounds of slack
# for a peer that stumbles, and still little memory for one that hangs.
DEFAULT_WINDOW = 64


class Mailbox(Generic[T]):
    """Hands messages from producers to a consumer on the same event loop, in order.

    put waits while `window` messages lie unread.  After close the consumer reads what is left and
    then ends; after fail it reads what is left and then raises the error.  put raises either way.
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
        """True after close or fail: nothing more can be put."""
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
        # Both sides must wake up to see it.
        self._arrived.set()
        self._has_space.set()

    def fail(self, error: DrafthouseError) -> None:
        """Like close, but the consumer and later producers are told why."""
        if not self._closed:
            self._error = error
        self.close()

    def clear(self) -> None:
        """Drop what lies unread: the consumer has left."""
        self._messages.clear()
        self._has_space.set()
