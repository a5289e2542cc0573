"""The ways between a worker's thread and the event loop of its links.

A target's streams are such links: each is one coordinator's, with its texts' names there, and the
frames to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

from cluster.errors import CapacityError
from cluster.models.engine_state import EngineState
from cluster.plan.texts import Text
from cluster.rpc.link import Link, Outbox
from cluster.rpc.messages import (
    MAX_UNACKNOWLEDGED,
    AdapterList,
    Load,
    StepFrame,
    StepReport,
    VerdictFrame,
)

T = TypeVar("T")
S = TypeVar("S")

# While so many frames wait for the worker's thread, no more are read from the link.
MAX_BACKLOG = 256


class LinkEnd(Outbox[S]):
    """The state that one link has created at a worker; made on the link's event loop.

    Inside the worker a request's id has the link's prefix, because coordinators choose ids
    independently.  Its methods for what is to be sent may be called from any thread: the loop runs
    them in the order of the calls.  unread: what is not sent yet; what, max_unread: its name, and
    the most of it.
    """

    what: ClassVar[str]
    max_unread: ClassVar[int]
    unread: Sized

    def __init__(self, number: int, link: Link[S, Any]) -> None:
        super().__init__(link)
        self.number = number
        self.prefix = f"{number}/"
        self._loop = asyncio.get_running_loop()
        self.is_behind = False  # the thread has as many frames to take as may wait

    def finish(self) -> None:
        """End the link once everything is sent."""
        self._call_soon(self.end)

    async def read_forever(self, mail: ThreadMail, apply: Callable[[Any, Any], object]) -> None:
        """Have the thread `apply` the frames that come; waits now and then until it has.

        Raises CapacityError where the coordinator does not read what it is told."""
        num_handed = 0
        async for frame in self.link:
            if len(self.unread) > self.max_unread:
                said = f"{len(self.unread)} {self.what} are unread; read what is sent"
                raise CapacityError(said)
            self.hear(frame)
            mail.put(partial(apply, self, frame))
            num_handed += 1
            if num_handed % MAX_BACKLOG == 0:
                self.is_behind = True
                await asyncio.wait({asyncio.wrap_future(mail.call(lambda: None))})
                self.is_behind = False

    def hear(self, frame: Any) -> None:
        """Note on the event loop that a frame has come."""

    def inside(self, request_id: str) -> str:
        """The name of a request inside the worker."""
        return self.prefix + request_id

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call `function`; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing can be sent
            self._loop.call_soon_threadsafe(function, *arguments)


class ThreadMail:
    """Calls to make in the worker's thread, between two steps and in their order."""

    def __init__(self, interrupt: Callable[[], object] = lambda: None) -> None:
        """interrupt: has the thread take them soon."""
        self._interrupt = interrupt
        self._calls = SimpleQueue[Callable[[], object]]()
        self._awaited = set[Future[Any]]()
        self.is_closed = False

    def put(self, function: Callable[[], object]) -> None:
        """Have `function` called in the thread, which ends with what it raises."""
        self._calls.put(function)
        self._interrupt()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called in the thread; cancelled where that ends before."""
        result: Future[T] = Future()
        self._awaited.add(result)
        result.add_done_callback(self._awaited.discard)

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except Exception as error:  # noqa: BLE001 - whoever asked gets it
                    result.set_exception(error)

        self.put(run)
        if self.is_closed:
            result.cancel()
        return result

    def close(self) -> None:
        """End the thread after the step it is in."""
        self.is_closed = True
        for result in self._awaited.copy():
            result.cancel()
        self.put(lambda: None)  # for a thread that waits

    def take(self, *, is_busy: bool) -> bool:
        """Make the calls that have come, after waiting where there is nothing else to do; False =
        it is closed."""
        if not is_busy:
            self._calls.get()()
        for _ in range(self._calls.qsize()):
            if self.is_closed:
                break
            self._calls.get()()
        return not self.is_closed


class TargetStream(LinkEnd[VerdictFrame]):
    """The state that one link has created at the worker; it is freed when the link ends.

    The event loop numbers its frames.
    acknowledged: serial of the last frame that the coordinator has acknowledged.  heard: serial of
    the coordinator's last frame that the engine has applied.  counts: True if this stream gets the
    target's own metrics.
    """

    # Among them are those that tell every second that the target is there.
    what, max_unread = "frames", 4 * MAX_UNACKNOWLEDGED

    def __init__(self, number: int, link: Link[VerdictFrame, StepFrame]) -> None:
        super().__init__(number, link)
        self.unread: deque[VerdictFrame] = deque()
        self.is_heard = False  # since the watch over silence looked
        self.serial = 0
        self.acknowledged = 0
        self.heard = 0
        self.counts = False
        self.is_plain = False  # its texts are to have no drafts at present

    @property
    def is_parked(self) -> bool:
        """True if its texts wait until the coordinator acknowledges frames again."""
        return self.serial - self.acknowledged > MAX_UNACKNOWLEDGED

    @property
    def gets_reports(self) -> bool:
        """True if it counts steps, and is not too far behind to be told of those of other texts.

        A busy machine parks the texts of one that counts for a moment, and its counters are to be
        right afterwards."""
        return self.counts and self.serial - self.acknowledged <= 3 * MAX_UNACKNOWLEDGED

    def hear(self, frame: StepFrame) -> None:
        """Note that the coordinator is there, and what it says that it has read."""
        self.is_heard = True
        self.acknowledged = max(self.acknowledged, min(frame.acknowledged, self.serial))

    def post(self, frame: VerdictFrame) -> None:
        """Send `frame` with the next serial.  Does nothing once the loop is closed."""
        self._call_soon(self._put, frame)

    def next_frame(self) -> VerdictFrame | None:
        """See `Outbox.next_frame`."""
        return self.unread.popleft() if self.unread else None

    def _put(self, frame: VerdictFrame) -> None:
        self.serial += 1
        self.unread.append(replace(frame, serial=self.serial))
        self.wake()


class TargetStreams:
    """The open streams.  The event loop opens and closes them.

    pages: of the KV cache, in use and in total; set by the engine thread.  engines: since a drafter
    inside was made anew, in place of those that the target described.
    """

    def __init__(self, max_texts: int, texts: Mapping[str, Text]) -> None:
        """max_texts: the most texts that the target runs at a time, 0 = any number.  texts: all."""
        self.pages = (0, 0)
        self._num_steps = 0
        self._texts = texts
        self._open: list[TargetStream] = []
        self._max_texts = max_texts
        self._numbers = itertools.count(1)
        self._adapters: AdapterList | None = None
        self.engines: tuple[EngineState, ...] = ()

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
        texts = list(self._texts.values())  # atomic in Python, so the engine thread may go on
        num_waiting = sum(text.num_steps == 0 for text in texts)  # those without a verdict yet
        num_running = len(texts) - num_waiting
        return Load(self.seats, num_running, num_waiting, self._num_steps, *self.pages)

    def note_step(self, report: StepReport) -> None:
        """Note that a step is done; called by the engine thread."""
        self._num_steps += 1
        self.pages = report.pages_in_use, report.pages_total

    def open(self, link: Link[VerdictFrame, StepFrame]) -> TargetStream:
        stream = TargetStream(next(self._numbers), link)
        stream.counts = not self._open
        self._open.append(stream)
        self._tell_all()
        return stream

    def close(self, stream: TargetStream) -> None:
        self._open.remove(stream)
        if self._open:
            self._open[0].counts = True
        self._tell_all()

    def announce(self, adapters: AdapterList) -> None:
        """Tell every present and future coordinator which adapters new requests may use."""
        self._adapters = adapters
        self._tell_all()

    def _tell_all(self) -> None:
        """Tell every coordinator of adapters and engines, and of its share of the seats."""
        for stream in self:
            stream.post(VerdictFrame(adapters=self._adapters, load=self.load, engines=self.engines))
