"""Ingress links: many requests multiplexed over one stream, leased to that stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from cluster.coordinator.present import Present
from cluster.coordinator.sessions import SessionTable
from cluster.core import EMPTY_TOKENS, FinishReason, Request, TokenEvent
from cluster.errors import CapacityError, DrafthouseError, WorkerError
from cluster.rpc.link import Link, Outbox, run_until_first_ends
from cluster.rpc.messages import HEARTBEAT_S, EventFrame, SubmitFrame, error_event

log = logging.getLogger(__name__)

# Far below any frame limit, also with twenty alternatives' log-probabilities per token.
_MAX_EVENTS_PER_FRAME = 256
# Of an ingress that was stopped for some seconds; what a client reads slowly waits there.
_MAX_UNREAD = 2**16


class IngressLink(Outbox[EventFrame]):
    """Serves one link.  Request ids are the ingress's own; `prefix` keeps links apart."""

    def __init__(
        self,
        table: SessionTable,
        link: Link[EventFrame, SubmitFrame],
        prefix: str,
        present: Present,
    ) -> None:
        super().__init__(link)
        self._table = table
        self._prefix = prefix
        self._present = present
        self._is_beat_due = False
        self._events: deque[TokenEvent] = deque()

    async def serve(self) -> None:
        """Until the link ends; its requests are then cancelled: nobody would read their text."""
        self._present.ingresses.add(self._beat)
        try:
            await run_until_first_ends(self._read_all(), self.send_forever(), self._beat_forever())
        except WorkerError as error:
            log.info("ingress link broke: %s", error.message)
        finally:
            self._present.ingresses.remove(self._beat)
            for name in list(self._present.sessions):
                if name.startswith(self._prefix):
                    self._table.cancel(name)

    async def _read_all(self) -> None:
        async for frame in self.link:
            for request in frame.requests:
                self._submit(request)
            for request_id in frame.cancelled:
                self._table.cancel(self._prefix + request_id)
            for request_id in frame.ended:
                self._table.cancel(self._prefix + request_id, FinishReason.STOP)

    def _submit(self, request: Request) -> None:
        name, sessions = self._prefix + request.id, self._present.sessions
        if name not in sessions:
            try:
                self._table.open(name, request, self._deliver)
                # The ingress may tell its client that the request is taken.
                if name in sessions and not request.was_admitted:
                    self._deliver(TokenEvent(request.id, len(request.output_ids), EMPTY_TOKENS))
            except DrafthouseError as error:
                self._deliver(error_event(request.id, error))
            return
        # A doubled id must not end the request that runs under it.
        log.warning("ingress sent a request id twice; the second was ignored")

    def _beat(self) -> None:
        """Tell the ingress how busy this is, and which adapters are served."""
        self._is_beat_due = True
        self.wake()

    async def _beat_forever(self) -> None:
        while True:
            if len(self._events) > _MAX_UNREAD:
                raise CapacityError(f"{len(self._events)} events are unread; read what is sent")
            self._beat()
            await asyncio.sleep(HEARTBEAT_S)

    def _deliver(self, event: TokenEvent) -> None:
        self._events.append(event)
        self.wake()

    def next_frame(self) -> EventFrame | None:
        if self._is_beat_due:
            self._is_beat_due = False
            return EventFrame(adapters=self._present.adapters, load=self._table.load())
        count = min(len(self._events), _MAX_EVENTS_PER_FRAME)
        events = tuple(self._events.popleft() for _ in range(count))
        return EventFrame(events) if events else None
