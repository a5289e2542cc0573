"""A link over one gRPC bidirectional stream, used by clients and servers.

Two tasks per link move bytes between the stream and two bounded mailboxes.  So cancelling a
coroutine that sends or iterates does not break the stream (gRPC would cancel the call), a dead peer
is detected at once even while nobody reads, and a full mailbox stops the reading, which HTTP/2 flow
control turns into back-pressure on the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from cluster.errors import DrafthouseError, WorkerError
from cluster.rpc.frames import FrameCodec
from cluster.rpc.link import Link, Mailbox, end_tasks
from cluster.rpc.messages import Refusal

log = logging.getLogger(__name__)

S = TypeVar("S")
R = TypeVar("R")

# How long close waits until the frames sent before have been written.
CLOSE_GRACE_S = 1.0


class ByteStream(Protocol):
    """A gRPC stream of bytes.  Its methods raise a DrafthouseError if the stream is broken.

    peer_ends: True on the client's side, which still reads until the peer ends after finish; False
    on the server's side, where the call ends with its handler.
    """

    peer_ends: bool

    async def read(self) -> bytes | None:
        """The next message; None if the peer has closed cleanly."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None:
        """Tell the peer that nothing more will be written."""
        ...

    async def dispose(self) -> None:
        """Free all resources; messages in flight are lost.  Never raises."""
        ...


class StreamLink(Link[Any, R], Generic[S, R]):
    """A `Link` over a ByteStream.  Must be created on the event loop that uses it.

    running: ends with the stream, for whatever reason.
    """

    def __init__(
        self,
        stream: ByteStream,
        outgoing: FrameCodec[S],
        incoming: FrameCodec[R],
        refuse: Callable[[tuple[Refusal, ...]], S] | None = None,
        *,
        max_frame_bytes: int,
    ) -> None:
        """refuse: makes the frame that tells the peer which of its items were malformed; None on
        the client's side, whose codec puts refusals into the frame."""
        super().__init__(Mailbox(), Mailbox())
        self._stream = stream
        self._outgoing, self._incoming, self._refuse = outgoing, incoming, refuse
        self._max_frame_bytes = max_frame_bytes
        self.running = asyncio.create_task(self._run())

    async def send(self, message: S) -> None:
        """Queue one frame; wait while the window is full.

        Raises WorkerError if the link is down, TooLargeError if one item of the frame exceeds the
        frame limit (nothing of the frame is sent then).
        """
        for data in self._outgoing.encode(message, self._max_frame_bytes):
            await self._outbox.put(data)

    async def close(self) -> None:
        """Send the queued frames, end the stream and free it; idempotent."""
        await super().close()
        await asyncio.wait({self.running}, timeout=CLOSE_GRACE_S)
        await end_tasks(self.running)

    def sever(self, error: DrafthouseError | None = None) -> None:
        # Users of a link treat every failure as a lost worker, so every error becomes WorkerError.
        if error is not None and not isinstance(error, WorkerError):
            lost = WorkerError(f"the link broke ({error.code}): {error.message}")
            lost.__cause__ = error
            error = lost
        super().sever(error)

    async def _run(self) -> None:
        reader = asyncio.create_task(self._read_all())
        writer = asyncio.create_task(self._write_all())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done() and self._stream.peer_ends:
                await asyncio.wait({reader})
            if not reader.done():
                writer.result()
                return
            reader.result()
            # The peer has closed and reads nothing more.
            self._inbox.close()
            self._outbox.close()
            await writer
        except DrafthouseError as error:
            self.sever(error)
        finally:
            # This runs also if the task is cancelled; the link then closes at once.
            self.sever(WorkerError("the link is closed; open a new one"))
            await end_tasks(reader, writer)
            await self._stream.dispose()

    async def _read_all(self) -> None:
        while (data := await self._stream.read()) is not None:
            if self._inbox.is_closed:
                continue  # the consumer has left; the end of our stream tells the peer
            frame, refusals = self._incoming.decode(data)
            if refusals and self._refuse is not None:
                log.warning("malformed items count=%d frame=%s", len(refusals), self._incoming.name)
                await self.send(self._refuse(tuple(refusals)))
            with contextlib.suppress(WorkerError):  # closed while waiting for space
                await self._inbox.put(frame)

    async def _write_all(self) -> None:
        try:
            while True:
                await self._stream.write(await self._outbox.get())
        except StopAsyncIteration:
            await self._stream.finish()
