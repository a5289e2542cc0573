"""A link: one open bidirectional stream of messages, over gRPC or in process.

gRPC streams and the in-process link implement the same protocol, so the coordinator and the
workers do not depend on the transport, and tests can drop, delay and reorder frames.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

Sent = TypeVar("Sent", contravariant=True)
Received = TypeVar("Received", covariant=True)


class Link(Protocol[Sent, Received]):
    """One end of a bidirectional stream.

    send: sends one message; waits only for back-pressure; raises WorkerError if the link is down.
    Iteration ends when the peer closes cleanly, and raises WorkerError when the link breaks.
    close: idempotent; ends the peer's iteration.
    """

    async def send(self, message: Sent) -> None: ...

    def __aiter__(self) -> AsyncIterator[Received]: ...

    async def close(self) -> None: ...
