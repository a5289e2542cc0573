"""One running request of the ingress, and the coordinator that has it.

A request is decoded at the target's pace whatever its client does, so a slow reader holds no place
and no KV pages.  What waits for one costs four bytes per token that it has not read, and what was
asked for beside the tokens; not an object per step: many small pieces become few large ones.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.core import Request, TokenEvent, token_array
from cluster.errors import CapacityError, DrafthouseError, error_from_code
from cluster.requests.fields import DraftStep
from cluster.rpc.channel import CoordinatorLink
from cluster.rpc.messages import AdapterList, Load, SubmitFrame, WorkerDescription

# Of one choice that asks for its draft trees.  A step without nodes counts as one.
MAX_NODES = 4096


@dataclass(slots=True)
class StepTrace:
    """The steps of one choice, as they arrive; those behind MAX_NODES nodes are dropped."""

    num_dropped: int = 0
    _num_steps: int = 0
    _num_nodes: int = 0
    _began_at: float = field(default_factory=time.monotonic)

    def take(self, steps: Sequence[DraftStep]) -> tuple[DraftStep, ...]:
        """Number and time these steps; returns those that are kept."""
        at_s, kept = time.monotonic() - self._began_at, list[DraftStep]()
        for number, step in enumerate(steps, self._num_steps):
            # The first one that does not fit is the end: what is kept has no holes.
            self._num_nodes += max(step.num_nodes, 1)
            if self._num_nodes > MAX_NODES:
                self.num_dropped += 1
            else:
                kept.append(replace(step, number=number, at_s=at_s))
        self._num_steps += len(steps)
        return tuple(kept)


# A client who reads at the pace of a model has one or two pieces waiting.
MAX_PIECES = 64


def _merged(events: Sequence[TokenEvent]) -> TokenEvent:
    said: dict[str, Any] = {
        name: tuple(one for event in events for one in getattr(event, name))
        for name in ("logprobs", "draft_sources", "draft_steps", "steps")
    }
    token_ids = np.concatenate([event.token_ids for event in events])
    return replace(events[0], token_ids=token_ids, **said)


class Ticket:
    """One running request.  `take` returns its new events; `close` must be called.

    arrived: set whenever an event arrives; several tickets may share it.  request: as it was last
    sent; its id changes with every failover, so that old events are recognised.  output: its
    tokens so far.  peer: that has it, None = none has.  is_complete: its text is, though its last
    event may still come.
    """

    def __init__(self, request: Request, arrived: asyncio.Event) -> None:
        self.request = request
        self.peer: CoordinatorPeer | None = None
        self.failovers = 0
        self.refused_by: set[str] = set()  # ids of peers that had no room for it
        self.finished = False
        self.is_complete = False
        self._first_id = request.id
        self.output = array("i", request.output_ids.tolist())
        self._arrived: list[TokenEvent] = []
        self._error: DrafthouseError | None = None
        self._is_answered = False
        self.trace = StepTrace()
        self._signal = arrived

    def is_admitted(self) -> bool:
        """True if a coordinator has taken the request; raises the error if it refused it."""
        if self._error is not None:
            raise self._error
        return self._is_answered or self.finished

    def push(self, event: TokenEvent) -> None:
        """Add an event from the coordinator, which goes on where the last one ended."""
        self._is_answered = True
        if event.draft_steps:
            event = replace(event, draft_steps=self.trace.take(event.draft_steps))
        self.output.extend(event.token_ids.tolist())
        if event.error_code:
            error = error_from_code(event.error_code, event.error_message)
            if isinstance(error, CapacityError):
                error.retry_after_s = event.retry_after_s
            self.fail(error)
            return
        self._arrived.append(event)
        if len(self._arrived) > MAX_PIECES:
            # The first and the last alone say more than which tokens came.
            first, *others, last = self._arrived
            self._arrived = [first, _merged(others), last]
        if event.finish_reason is None:
            self._signal.set()
        else:
            self.end()

    def fail(self, error: DrafthouseError) -> None:
        self._error = error
        self.end()

    def end(self) -> None:
        """End the request: no more events will arrive, not even statistics."""
        self.leave()
        self.finished = True
        self._signal.set()

    def leave(self) -> None:
        """No coordinator has it any more."""
        if self.peer is not None:
            del self.peer.tickets[self.request.id]
            self.peer = None

    def complete(self) -> None:
        """Ask for the end of a request whose text is complete; its last event still arrives, with
        the statistics."""
        self.is_complete = True
        if self.peer is None:  # it has ended, or its coordinator was lost with the statistics
            self.end()
        else:
            self.peer.tell(ended=self.request.id)

    def close(self) -> None:
        """Forget the request; a coordinator that still works on it is told to cancel it."""
        if self.peer is not None:
            self.peer.tell(cancelled=self.request.id)
        self.end()

    def take(self) -> list[TokenEvent]:
        """All events since the last call, possibly none.

        After the last events, raises the error that ended the request, unless its text is complete:
        then only its statistics were to come.  Those of a beam search stay, for every choice to
        take its text from; an error comes before them.
        """
        events, is_search = self._arrived, self.request.params.beams is not None
        if self._error is not None and not self.is_complete:
            if is_search or not events:
                raise self._error
            self._signal.set()  # of the next call, which raises it
        if not is_search:
            self._arrived = []
        return events

    def resumed(self) -> Request:
        """The request from now on, in the form in which another coordinator continues it."""
        self.failovers += 1
        self.request = replace(
            self.request,
            id=f"{self._first_id}~{self.failovers}",
            output_ids=token_array(self.output),
            was_admitted=self._is_answered or self.request.was_admitted,
        )
        return self.request


@dataclass(eq=False)
class CoordinatorPeer:
    """One coordinator: its stream, its running requests, and what is to be sent next.

    adapters: what it last said of them.  seats: at all its targets; until it has said it, it is
    taken to have some.  is_heard: since the last look.  _num_elsewhere: its requests of other
    ingresses.
    """

    id: str
    description: WorkerDescription
    link: CoordinatorLink
    adapters: AdapterList | None = None
    seats: int = 1
    is_heard: bool = False
    _num_elsewhere: int = 0
    tickets: dict[str, Ticket] = field(default_factory=dict)
    outbox: asyncio.Queue[SubmitFrame] = field(default_factory=asyncio.Queue)

    def take(self, ticket: Ticket) -> None:
        """Have the request from now on."""
        ticket.leave()
        ticket.peer = self
        self.tickets[ticket.request.id] = ticket
        self.tell(requests=ticket.request)

    def tell(self, **news: Any) -> None:
        """Send one soon of what a SubmitFrame may have.  Each goes alone: a request that is too
        large ends nothing else."""
        frame = SubmitFrame(**{name: (one,) for name, one in news.items()})
        self.outbox.put_nowait(frame)

    @property
    def num_in_hand(self) -> int:
        """Requests that it has, as it last said and as was sent since."""
        return self._num_elsewhere + len(self.tickets)

    def note_load(self, load: Load) -> None:
        """It has said how busy it is."""
        self.seats = load.seats
        self._num_elsewhere = max(load.num_running + load.num_waiting - len(self.tickets), 0)
