"""The ways between a worker's thread and the event loop of its links."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import Future
from typing import Any, ClassVar, Generic, TypeVar, TypeVarTuple, Unpack

from cluster.errors import CapacityError, WorkerError
from cluster.rpc.link import Link

T = TypeVar("T")
Sender = TypeVar("Sender", bound="LinkEnd")
Frame = TypeVar("Frame")
Arguments = TypeVarTuple("Arguments")

# While so many frames wait for the worker's thread, no more are read from the link.
MAX_BACKLOG = 256


class LinkEnd:
    """The state that one link has created at a worker; made on the link's event loop.

    Inside the worker a request's id has the link's prefix, because coordinators choose ids
    independently.  Its methods for what is to be sent may be called from any thread: the loop runs
    them in the order of the calls.  what, max_unread: what its peer leaves unread, and how many.
    """

    what: ClassVar[str]
    max_unread: ClassVar[int]

    def __init__(self, number: int, unread: Sized) -> None:
        """unread: what is not sent yet."""
        self.number = number
        self.prefix = f"{number}/"
        self._unread = unread
        self._is_finished = False
        self._error: WorkerError | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()  # there is something to send
        self._room = asyncio.Semaphore(MAX_BACKLOG)
        self._num_taken = 0  # by the thread, and not said yet

    def take(self) -> Iterable[Any]:
        """Return the frames to send now, which are unread no more."""
        raise NotImplementedError

    async def send_forever(self, link: Link[Any, Any]) -> None:
        """Send what there is until `finish`; raises the error that this was given."""
        is_finished = False
        while not is_finished:
            await self._wake.wait()
            self._wake.clear()
            is_finished = self._is_finished
            for frame in self.take():
                await link.send(frame)
        if self._error is not None:
            raise self._error

    def finish(self, error: WorkerError | None = None) -> None:
        """End the link once everything is sent."""
        self._call_soon(self._finish, error)

    def _finish(self, error: WorkerError | None) -> None:
        self._is_finished, self._error = True, error
        self._wake.set()

    def check_read(self) -> None:
        """Raise CapacityError where the coordinator does not read what it is told."""
        if len(self._unread) > self.max_unread:
            raise CapacityError(f"{len(self._unread)} {self.what} are unread; read what is sent")

    @property
    def is_behind(self) -> bool:
        """True while the thread has as many frames to take as may wait."""
        return self._room.locked()

    async def frame_handed(self) -> None:
        """Wait until the thread has caught up with the frames that it was handed."""
        await self._room.acquire()

    def frames_taken(self, count: int) -> None:
        """Make room for as many frames more; called by the thread."""
        self._num_taken += count
        # Said now and then only: a call to the event loop wakes it up.
        if self._num_taken >= MAX_BACKLOG // 2:
            self._call_soon(self._make_room, self._num_taken)
            self._num_taken = 0

    def _make_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()

    def inside(self, request_id: str) -> str:
        """The name of a request inside the worker."""
        return self.prefix + request_id

    def _call_soon(
        self, function: Callable[[Unpack[Arguments]], object], *arguments: *Arguments
    ) -> None:
        """Have the event loop call `function`; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing can be sent
            self._loop.call_soon_threadsafe(function, *arguments)


class ThreadMail(Generic[Sender, Frame]):
    """Mail for the thread: frames of coordinators, and calls to make there.

    A link waits for `frame_handed` before each frame that it puts."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._mail: deque[tuple[Sender, Frame | None]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self.is_closed = False

    def put(self, sender: Sender, frame: Frame | None) -> None:
        """Leave a frame, or word that the sender has ended."""
        with self._condition:
            self._mail.append((sender, frame))
            self._condition.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called in the thread, between two steps; cancelled where that
        ends before."""
        result: Future[T] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except Exception as error:  # noqa: BLE001 - whoever asked gets it
                    result.set_exception(error)

        with self._condition:
            if self.is_closed:
                result.cancel()
            else:
                self._calls.append((result, run))
                self._condition.notify()
        return result

    def close(self) -> None:
        """End the thread after the step it is in."""
        with self._condition:
            self.is_closed = True
            left = list(self._calls)
            self._calls.clear()
            self._condition.notify()
        for result, _ in left:
            result.cancel()

    def take(self, *, is_busy: bool) -> list[tuple[Sender, Frame | None]] | None:
        """Return what has come, after waiting where there is nothing else to do; None = closed."""
        with self._condition:
            if not is_busy:
                self._condition.wait_for(lambda: self._mail or self._calls or self.is_closed)
            if self.is_closed:
                return None
            mail, calls = list(self._mail), list(self._calls)
            self._mail.clear()
            self._calls.clear()
        for _, call in calls:
            call()
        for sender, count in Counter(sender for sender, frame in mail if frame is not None).items():
            sender.frames_taken(count)
        return mail
