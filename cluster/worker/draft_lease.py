"""What a draft worker has to send to one link: the newest of everything, never a queue.

The growth thread puts results in; the link's writer, on its event loop, takes frames out.  A link
that could not send for a while then sends only the newest proposal of each request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.core import Completion, Observation, Proposal
from cluster.messages import ProposalFrame, Refusal

# While so many frames wait for the growth thread, no more are read from the link.
MAX_BACKLOG = 256


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """What the whole drafter holds: requests, and KV pages (0 without an engine)."""

    pages_in_use: int = 0
    pages_total: int = 0
    num_requests: int = 0


class DraftLease:
    """One link's requests and its outbox.

    number: namespaces the request ids of the link.  Created on the link's event loop; put_* and
    finish are called from the growth thread, everything else on the loop.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._proposals: dict[str, Proposal] = {}
        self._observations: dict[str, Observation] = {}
        self._refusals: dict[str, Refusal] = {}
        self._completions: dict[str, Completion] = {}
        self._load = DrafterLoad()
        self._sent_load = DrafterLoad()
        self._draft_time_s = 0.0
        self._sent_draft_time_s = 0.0
        self._due = False  # there is something to send, and the writer is awake
        self._backlog = 0
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._finished = False

    # On the event loop

    async def next_frame(self) -> ProposalFrame | None:
        """Wait for news, and return all of it since the last frame; None at the end."""
        await self._wake.wait()
        self._wake.clear()
        with self._lock:
            if self._finished:
                self._wake.set()
                return None
            frame = ProposalFrame(
                tuple(self._proposals.values()),
                tuple(self._observations.values()),
                tuple(self._refusals.values()),
                self._load.pages_in_use,
                self._load.pages_total,
                self._load.num_requests,
                self._draft_time_s - self._sent_draft_time_s,
                tuple(self._completions.values()),
            )
            self._proposals, self._observations, self._refusals = {}, {}, {}
            self._completions = {}
            self._sent_load, self._sent_draft_time_s = self._load, self._draft_time_s
            self._due = False
        return frame

    async def room(self) -> None:
        """Wait until the growth thread has caught up with the frames it was handed."""
        await self._has_room.wait()

    def frame_handed(self) -> None:
        with self._lock:
            self._backlog += 1
            if self._backlog >= MAX_BACKLOG:
                self._has_room.clear()

    # From the growth thread

    def frame_taken(self) -> None:
        with self._lock:
            self._backlog -= 1
            crowded = self._backlog == MAX_BACKLOG // 2
        if crowded:
            self._call(self._has_room.set)

    def put(
        self,
        load: DrafterLoad,
        draft_time_s: float,
        proposals: Iterable[Proposal] = (),
        observations: Iterable[Observation] = (),
        refusals: Iterable[Refusal] = (),
        completions: Iterable[Completion] = (),
    ) -> None:
        """Keep the newest of everything, and wake the writer if there is something to send.

        draft_time_s: the drafter's computing time since the worker's start.
        """
        with self._lock:
            self._load, self._draft_time_s = load, draft_time_s
            self._proposals.update((each.request_id, each) for each in proposals)
            self._observations.update((each.request_id, each) for each in observations)
            self._refusals.update((each.request_id, each) for each in refusals)
            self._completions.update((each.request_id, each) for each in completions)
            news = self._proposals or self._observations or self._refusals or self._completions
            if self._due or not (news or load != self._sent_load):
                return
            self._due = True
        self._call(self._wake.set)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Drop what is not sent yet about released requests, except refusals."""
        with self._lock:
            for request_id in request_ids:
                self._proposals.pop(request_id, None)
                self._observations.pop(request_id, None)
                self._completions.pop(request_id, None)

    def finish(self) -> None:
        """The worker stops: next_frame answers None."""
        with self._lock:
            self._finished = True
        self._call(self._wake.set)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop is closed, so nothing can be sent.
            return
