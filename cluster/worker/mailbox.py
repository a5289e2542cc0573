"""Mail for a worker's thread: frames of coordinators, and calls to make there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from cluster.messages import StepFrame
from cluster.worker.target_stream import TargetStream

T = TypeVar("T")
Sender = TypeVar("Sender")
Frame = TypeVar("Frame")


class ThreadMail(Generic[Sender, Frame]):
    """Filled from any thread, emptied by the one that works."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._mail: deque[tuple[Sender, Frame | None]] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._is_closed = False

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
            if self._is_closed:
                result.cancel()
            else:
                self._calls.append((result, run))
                self._condition.notify()
        return result

    def close(self) -> None:
        """End the thread after the step it is in."""
        with self._condition:
            self._is_closed = True
            left = list(self._calls)
            self._calls.clear()
            self._condition.notify()
        for result, _ in left:
            result.cancel()

    def take(self, *, is_busy: bool) -> list[tuple[Sender, Frame | None]] | None:
        """Return what has come, after waiting where there is nothing else to do; None = closed."""
        with self._condition:
            if not is_busy:
                self._condition.wait_for(lambda: self._mail or self._calls or self._is_closed)
            if self._is_closed:
                return None
            mail, calls = list(self._mail), list(self._calls)
            self._mail.clear()
            self._calls.clear()
        for _, call in calls:
            call()
        return mail


Mailbox = ThreadMail[TargetStream, StepFrame]
# None means that the stream has ended.
Mail = tuple[TargetStream, StepFrame | None]
