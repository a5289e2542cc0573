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

# Steps that a coordinator may leave unacknowledged before its texts are parked: half a second of
# quick ones, in which nothing is lost if it has only been busy.
_MAX_UNACKNOWLEDGED = 64


class TargetStream:
    """All that one link has created at the worker; it is freed when the link ends.

    Inside the worker a request's id has the stream's prefix, since coordinators choose ids by
    themselves.  Frames may be posted from any thread; they are numbered where they are sent, in the
    event loop that created the stream.  acknowledged: the last one that the coordinator has said to
    have.  heard: serial of its last frame that the engine has taken in.  counts: whether it is told
    of the target's own metrics.
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
        """True if its texts wait until it says that it still reads."""
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
        """Send what is posted; raises the error that the stream was failed with."""
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
    """Those that are open.  Opened and closed by the event loop.

    pages: of the KV cache, in use and of how many; set by the engine thread.
    """

    def __init__(self, max_texts: int, texts: Texts) -> None:
        """max_texts: that the target runs at a time, 0 = any number.  texts: that it runs."""
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
        """How many texts each of them may have, 0 = any number: a share for each, so that one
        which asks for too much takes nothing from the others."""
        return -(-self._max_texts // max(len(self._open), 1))

    @property
    def load(self) -> Load:
        """The load as every coordinator is told it."""
        num_waiting = self._texts.num_waiting
        num_running = max(len(self._texts) - num_waiting, 0)
        return Load(self.seats, num_running, num_waiting, self._num_steps, *self.pages)

    def note_step(self, report: StepReport) -> None:
        """A step is done; called by the engine thread."""
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
        """Tell every coordinator, now and as it comes, what new requests may ask for."""
        self._adapters = adapters
        self._tell_all()

    def _tell_all(self) -> None:
        """Tell every coordinator of the adapters, and of its share of the seats."""
        for stream in self._open:
            stream.post(VerdictFrame(adapters=self._adapters, load=self.load))
