"""One link to the target worker: its requests' names there, and the frames to send."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from cluster.core import Verdict, VerifyItem
from cluster.errors import WorkerError
from cluster.messages import AdapterList, CacheMiss, Refusal, StepReport, VerdictFrame
from cluster.rpc.link import Link


class TargetLease:
    """The state that one link has created at the worker; it is freed when the link ends.

    Inside the worker a request's id has the lease's prefix, since links choose ids by themselves.
    `pending` belongs to the engine thread, everything else to the event loop that created the
    lease.
    """

    def __init__(self, number: int) -> None:
        self.prefix = f"{number}/"
        self.request_ids: set[str] = set()
        self.pending: dict[str, VerifyItem] = {}
        self._loop = asyncio.get_running_loop()
        self._frames: deque[VerdictFrame] = deque()
        self._error: WorkerError | None = None
        self._wake = asyncio.Event()

    def inside(self, item: VerifyItem) -> VerifyItem:
        """`item` under the name it has inside the worker."""
        return replace(item, request_id=self.prefix + item.request_id)

    def owns(self, request_id: str) -> bool:
        """Whether that name inside the worker is one of this link's."""
        return request_id.startswith(self.prefix)

    def is_doubled(self, item: VerifyItem) -> bool:
        """Whether this very item is being worked on: a frame that came twice."""
        pending = self.pending.get(item.request_id)
        return (
            pending is not None
            and pending.generation == item.generation
            and pending.base_len == item.base_len
            and pending.context_len == item.context_len
        )

    def outside(self, request_id: str) -> str:
        return request_id[len(self.prefix) :]

    def post(self, frame: VerdictFrame) -> None:
        """Send `frame`; called from the engine thread.  Does nothing once the loop is closed."""
        self._call_soon(self._put, frame)

    def fail(self, error: WorkerError) -> None:
        """End the link with `error`; called from the engine thread."""
        self._call_soon(self._fail, error)

    async def send_forever(self, link: Link[VerdictFrame, object]) -> None:
        """Send what is posted; raises the error that the lease was failed with."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._frames:
                await link.send(self._frames.popleft())
            if self._error is not None:
                raise self._error

    def _put(self, frame: VerdictFrame) -> None:
        self._frames.append(frame)
        self._wake.set()

    def _fail(self, error: WorkerError) -> None:
        self._error = error
        self._wake.set()

    def _call_soon(self, callback: object, argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]


class Leases:
    """Those of the links that are open.  Used from the event loop."""

    def __init__(self) -> None:
        self._open: set[TargetLease] = set()
        self._num_opened = 0
        self._adapters: AdapterList | None = None

    def __iter__(self) -> Iterator[TargetLease]:
        return iter(self._open)

    def open(self) -> TargetLease:
        self._num_opened += 1
        lease = TargetLease(self._num_opened)
        self._open.add(lease)
        if self._adapters is not None:
            lease.post(VerdictFrame(adapters=self._adapters))
        return lease

    def close(self, lease: TargetLease) -> None:
        self._open.discard(lease)

    def announce(self, adapters: AdapterList) -> None:
        """Tell every link, now and as it opens, what new requests may ask for."""
        self._adapters = adapters
        for lease in self._open:
            lease.post(VerdictFrame(adapters=adapters))


class Answers:
    """What the worker says to one lease after a step or a refusal."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.misses: list[CacheMiss] = []
        self.refusals: list[Refusal] = []

    def frame(self, report: StepReport | None) -> VerdictFrame:
        return VerdictFrame(tuple(self.verdicts), tuple(self.misses), tuple(self.refusals), report)
