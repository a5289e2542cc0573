"""A link: one open bidirectional conversation, whatever carries it.

gRPC streams and the in-process link implement the same two protocols, so the coordinator and
the workers never know which one they are on, and tests can drop, delay and reorder frames.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class Link(Protocol[Sent, Received]):
    """One side of a conversation.

    send: hands one message over; waits only for back-pressure; raises WorkerError when the link is
    down.  Iteration ends when the peer closed in order, and raises WorkerError when the link broke.
    close: idempotent; the peer's iteration ends.
    """

    async def send(self, message: Sent) -> None: ...

    def __aiter__(self) -> AsyncIterator[Received]: ...

    async def close(self) -> None: ...
