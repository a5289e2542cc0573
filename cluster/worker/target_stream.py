"""One coordinator's stream at the target worker: its texts' names there, and the frames to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from cluster.errors import WorkerError
from cluster.messages import AdapterList, Load, StepReport, VerdictFrame
from cluster.rpc.link import Link

# The steps that a coordinator may leave unacknowledged before its texts are parked.  That is half a
# second of quick steps, so a coordinator that was only busy loses nothing.
_MAX_UNACKNOWLEDGED = 64


class TargetStream:
    """The state that one link has created at the worker; it is freed when the link ends.

    Inside the worker a request's id has the stream's prefix, because coordinators choose ids
    independently.  Frames may be posted from any thread; the event loop that created the stream
    numbers and sends them.  acknowledged: serial of the last frame that the coordinator has
    acknowledged.  heard: serial of the coordinator's last frame that the engine has applied.
    counts: True if this stream gets the target's own metrics.
    """

    def __init__(self, number: int) -> None:
        self.prefix = f"{number}/"
        self.serial = 0
        self.acknowledged = 0
        self.heard = 0
        self.counts = False
        self.is_over = False
        self._loop = asyncio.get_running_loop()
        self._frames: deque[VerdictFrame] = deque()
        self._error: WorkerError | None = None
        self._wake = asyncio.Event()

    @property
    def is_parked(self) -> bool:
        """True if its texts wait until the coordinator acknowledges frames again."""
        return self.serial - self.acknowledged > _MAX_UNACKNOWLEDGED

    def inside(self, request_id: str) -> str:
        """The name of a request inside the worker."""
        return self.prefix + request_id

    def outside(self, name: str) -> str:
        return name[len(self.prefix) :]

    def post(self, frame: VerdictFrame) -> None:
        """Send `frame` with the next serial.  Does nothing once the loop is closed."""
        self._call_soon(self._put, frame)

    def fail(self, error: WorkerError) -> None:
        """End the link with `error`; called from the engine thread."""
        self._call_soon(self._fail, error)

    async def send_forever(self, link: Link[VerdictFrame, object]) -> None:
        """Send posted frames; raises the error that was passed to `fail`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._frames:
                await link.send(self._frames.popleft())
            if self._error is not None:
                raise self._error

    def _put(self, frame: VerdictFrame) -> None:
        self.serial += 1
        self._frames.append(replace(frame, serial=self.serial, acknowledged=self.heard))
        self._wake.set()

    def _fail(self, error: WorkerError) -> None:
        self._error = error
        self._wake.set()

    def _call_soon(self, callback: Callable[[VerdictFrame], None] | Callable[[WorkerError], None],
                   argument: object) -> None:  # fmt: skip
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]


class Texts(Protocol):
    """The texts of all streams, counted from any thread."""

    def __len__(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class TargetStreams:
    """The open streams.  The event loop opens and closes them.

    pages: of the KV cache, in use and in total; set by the engine thread.
    """

    def __init__(self, max_texts: int, texts: Texts) -> None:
        """max_texts: the most texts that the target runs at a time, 0 = any number.  texts: all."""
        self.pages = (0, 0)
        self._num_steps = 0
        self._texts = texts
        self._open: list[TargetStream] = []
        self._max_texts = max_texts
        self._num_opened = 0
        self._adapters: AdapterList | None = None

    def __iter__(self) -> Iterator[TargetStream]:
        return iter(self._open.copy())

    @property
    def seats(self) -> int:
        """The most texts that each stream may have, 0 = any number.  Each gets an equal share, so
        that a stream which asks for too much takes nothing from the others."""
        return -(-self._max_texts // max(len(self._open), 1))

    @property
    def load(self) -> Load:
        """The load that every coordinator is told."""
        num_waiting = self._texts.num_waiting
        num_running = max(len(self._texts) - num_waiting, 0)
        return Load(self.seats, num_running, num_waiting, self._num_steps, *self.pages)

    def note_step(self, report: StepReport) -> None:
        """Note that a step is done; called by the engine thread."""
        self._num_steps += 1
        self.pages = report.pages_in_use, report.pages_total

    def open(self) -> TargetStream:
        self._num_opened += 1
        stream = TargetStream(self._num_opened)
        stream.counts = not self._open
        self._open.append(stream)
        self._tell_all()
        return stream

    def close(self, stream: TargetStream) -> None:
        stream.is_over = True
        self._open.remove(stream)
        if stream.counts and self._open:
            self._open[0].counts = True
        self._tell_all()

    def announce(self, adapters: AdapterList) -> None:
        """Tell every present and future coordinator which adapters new requests may use."""
        self._adapters = adapters
        self._tell_all()

    def _tell_all(self) -> None:
        """Tell every coordinator of the adapters, and of its share of the seats."""
        for stream in self._open:
            stream.post(VerdictFrame(adapters=self._adapters, load=self.load))
