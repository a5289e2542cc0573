"""The ingress' connections to the coordinators: one stream each for many requests, and failover.

If a coordinator dies or falls silent, its requests are sent to another one with the tokens they
already have.  The text does not depend on the coordinator, so the client only sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.workers import served_by_all
from cluster.core import FinishReason, Request, TokenEvent
from cluster.errors import CapacityError, DrafthouseError, TooLargeError, UnavailableError
from cluster.rpc.channel import CoordinatorLink
from cluster.rpc.connections import Endpoint
from cluster.rpc.link import run_until_first_ends
from cluster.rpc.messages import WorkerDescription
from deployments.ingress.ticket import CoordinatorPeer, Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")

_RESUME_PAUSE_S = 0.05
# Coordinators say every second that they are there.  Looks are counted, not time: when the ingress
# itself was stopped, it has heard nobody meanwhile, and that counts as one look.
_NUM_LOOKS = 12


class Coordinators:
    """Distributes requests over the connected coordinators, without affinity."""

    def __init__(self, settings: CoordinatorConfig) -> None:
        """settings: how long a request waits for a coordinator before it ends with 503, and a
        coordinator says nothing before it is left, are those of targets."""
        self._settings = settings
        self._peers: dict[str, CoordinatorPeer] = {}
        self._changed = asyncio.Event()
        self.is_stopping = False  # nothing new may begin
        self._resumptions: set[asyncio.Task[None]] = set()
        # Of the adapters that requests may ask for, by name what coordinators call them.
        self.adapters: Mapping[str, str] = {}

    @property
    def links(self) -> Mapping[str, CoordinatorLink]:
        """Those to the coordinators that are connected and can take requests."""
        return {peer.id: peer.link for peer in self._peers.values()}

    async def use(
        self, endpoint: Endpoint, description: WorkerDescription, link: CoordinatorLink
    ) -> None:
        """Send requests to this coordinator until its link ends or it falls silent; then resume
        them elsewhere."""
        peer = CoordinatorPeer(endpoint.id, description, link)
        self._peers[peer.id] = peer
        self._announce()
        try:
            await run_until_first_ends(self._read(peer), self._write(peer), self._watch(peer))
        except DrafthouseError as error:
            log.warning("lost coordinator id=%s: %s", peer.id, error)
        finally:
            del self._peers[peer.id]
            self._update_adapters()
            self._announce()
            for ticket in tuple(peer.tickets.values()):
                self._resume_later(ticket)

    def begin_stopping(self) -> None:
        self.is_stopping = True
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changes(self) -> AsyncIterator[None]:
        """Yield at once, and whenever a coordinator has connected or disconnected, until the server
        is stopping."""
        is_over = False
        while not is_over:
            # Taken before the caller looks, so that no change meanwhile is missed.
            changed, is_over = self._changed, self.is_stopping
            yield
            if not is_over:
                await changed.wait()

    def _resume_later(self, ticket: Ticket) -> None:
        ticket.leave()
        task = asyncio.create_task(self._resume(ticket), name=f"resume {ticket.request.id}")
        self._resumptions.add(task)
        task.add_done_callback(self._resumptions.discard)

    @property
    def max_context_len(self) -> int:
        """Maximum tokens of prompt and output together, 0 while no coordinator is connected."""
        return min((peer.description.max_context_len for peer in self._peers.values()), default=0)

    def submit(self, request: Request, arrived: asyncio.Event) -> Ticket:
        """Send the request to the least loaded coordinator; its events arrive in the ticket, or
        UnavailableError if no coordinator connects in time."""
        ticket = Ticket(request, arrived)
        if self._peers:
            self._place(ticket)
        else:
            self._resume_later(ticket)
        return ticket

    async def wait_connected(self) -> None:
        """Wait for a coordinator to connect; raises UnavailableError if none does in time."""
        limit_s = self._settings.target_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not self._peers:
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(
                f"no coordinator answered within {limit_s:g} s; try again later"
            ) from None

    def _place(self, ticket: Ticket) -> None:
        peer = min(
            self._peers.values(),
            key=lambda one: (one.id in ticket.refused_by, not one.seats, one.num_in_hand),
        )
        peer.take(ticket)

    async def _resume(self, ticket: Ticket) -> None:
        if ticket.finished or ticket.is_complete:
            ticket.end()
            return
        request = ticket.resumed()
        # A coordinator that is shutting down refuses requests until its stream ends.
        await asyncio.sleep(min(_RESUME_PAUSE_S * (ticket.failovers - 1), 1.0))
        try:
            await self.wait_connected()
            if not ticket.finished:  # closed meanwhile
                log.warning("resuming request id=%s at token %d", request.id, len(ticket.output))
                self._place(ticket)
        except DrafthouseError as error:
            ticket.fail(error)

    async def _write(self, peer: CoordinatorPeer) -> None:
        """Send all that there is to tell; a request that is too large ends alone."""
        while True:
            frame = await peer.outbox.get()
            try:
                await peer.link.send(frame)
            except TooLargeError as error:
                for request in frame.requests:
                    if request.id in peer.tickets:
                        peer.tickets[request.id].fail(error)

    async def _watch(self, peer: CoordinatorPeer) -> None:
        """Return when the coordinator has said nothing for too long."""
        num_missed, silence_s = 0, self._settings.target_silence_s
        while num_missed < _NUM_LOOKS:
            await asyncio.sleep(silence_s / _NUM_LOOKS)
            num_missed = 0 if peer.is_heard else num_missed + 1
            peer.is_heard = False
        log.error("coordinator is left id=%s: it said nothing for %g s", peer.id, silence_s)

    async def _read(self, peer: CoordinatorPeer) -> None:
        async for frame in peer.link:
            peer.is_heard = True
            if frame.load is not None:
                peer.note_load(frame.load)
            if frame.adapters is not None:
                peer.adapters = frame.adapters
                self._update_adapters()
            for event in frame.events:
                self._deliver(peer, event)

    def _update_adapters(self) -> None:
        """Serve the adapters that every coordinator has: any of them may get the next request.

        A coordinator that has said nothing yet is left out.  If that is all, nothing changes.
        """
        told = [peer.adapters for peer in self._peers.values() if peer.adapters is not None]
        if told:
            self.adapters = {each.partition("@")[0]: each for each in served_by_all(told).served}

    def _deliver(self, peer: CoordinatorPeer, event: TokenEvent) -> None:
        ticket = peer.tickets.get(event.request_id)
        if ticket is None:  # it was closed; late events are normal
            return
        is_full = event.error_code == CapacityError.code
        if is_full:
            ticket.refused_by.add(peer.id)
        missing = event.position - len(ticket.output)
        if missing > 0 or (missing and len(event.token_ids)):
            log.error("tokens of id=%s do not follow: resuming the request", event.request_id)
            peer.tell(cancelled=event.request_id)
            self._resume_later(ticket)
        elif event.finish_reason is FinishReason.CANCELLED and not ticket.is_complete:
            # We did not cancel it: that coordinator is shutting down, and another one continues.
            self._resume_later(ticket)
        elif is_full and not self._peers.keys() <= ticket.refused_by:  # another may have room
            self._place(ticket)
        else:
            ticket.push(event)


async def answers_of(
    links: Mapping[str, CoordinatorLink], question: Callable[[CoordinatorLink], Awaitable[T]]
) -> list[T]:
    """What those coordinators said that answered."""

    async def ask(name: str, link: CoordinatorLink) -> list[T]:
        try:
            return [await question(link)]
        except DrafthouseError as error:
            log.info("coordinator id=%s did not answer: %s", name, error)
            return []

    answers = await asyncio.gather(*(ask(*each) for each in links.items()))
    return [answer for found in answers for answer in found]
