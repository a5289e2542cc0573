"""One connected target: the sessions it owns, the batch it works on, and what it must be sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.session import Session
from cluster.core import VerifyItem
from cluster.messages import StepReport, VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.link import Link
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.cohorts import CohortChoice
from cluster.spec.step_profile import StepProfile

# Weight of the newest decode step in the running estimate of how long one takes.
_STEP_TIME_WEIGHT = 0.2


@dataclass(slots=True)
class OpenRound:
    """A decode batch from the moment its frame was handed over.

    pending: its sessions that are not answered yet.  stepping: the same until one of them is, or a
    step says that it could do nothing: as long as the batch is taken to be computed as one.
    is_clean: no prefill was under way with it, so its round trip is that of decoding alone.
    is_queued: another batch was under way when it was sent.
    waited_s: before it went, for drafts.
    planned_s: what the coordinator took for it after the verdicts before it, without that wait, but
    with drafted_s, which the target's residents took.
    report: the last step report of the batch, once it is complete; received_at likewise.
    answers: the sessions that were answered, and the plain steps that their tokens would have
    taken.  is_sampled: the law of the batch.  asked: what residents were asked for before it.
    num_read: texts that models read within drafted_s.
    """

    sent_at: float
    num_sequences: int
    num_nodes: int
    pending: set[str]
    stepping: set[str]
    is_clean: bool
    is_queued: bool = False
    waited_s: float = 0.0
    planned_s: float = 0.0
    drafted_s: float = 0.0
    received_at: float = 0.0
    report: StepReport | None = None
    answers: list[tuple[Session, int]] = field(default_factory=list)
    is_sampled: bool = False
    asked: Ask = NO_DRAFTS
    num_read: int = 0

    def leave_out_stall(self, planned_s: float) -> None:
        """A resident has stalled before it, which tells nothing of what rounds take.

        planned_s: what planning takes usually."""
        self.is_clean = False
        self.planned_s, self.drafted_s = planned_s, 0.0


# A target of which no batch has waited for so many rounds will not wait for the next one either.
_WAITING_ROUNDS = 8
# While one of two batches is under way the other begins with at least such a share of its half of
# the sequences: fewer rather wait for the first one's than read all weights for themselves.
_MIN_COHORT = 0.5


class TargetSeat:
    """A target replica as the round loop sees it.

    A session it owns is in exactly one of unsent (a longer delta is still to be sent), prefilling,
    ready and decoding.
    """

    def __init__(
        self,
        target_id: str,
        description: WorkerDescription,
        link: Link[VerifyFrame, VerdictFrame],
        max_frame_tokens: int,
        now: float,
    ) -> None:
        self.id = target_id
        self.description = description
        self.devices = frozenset(description.devices)
        self.is_on_cpu = any("/cpu" in device for device in description.devices)
        self.link = link
        self.residents: dict[str, DrafterReplica] = {}  # the drafters inside it, by name
        self.draft_time_s = 0.0  # running mean of what they take together
        self.drafted_s = 0.0  # what they took since the last batch began
        self.num_read = 0  # texts that models read in that time
        self.has_stalled = False  # one of them has, since the last batch began
        self.planned_s = 0.0  # running mean of `OpenRound.planned_s` where they drafted nothing
        self.sessions: dict[str, Session] = {}
        self.unsent: dict[str, Session] = {}
        self.prefilling: dict[str, Session] = {}
        self.ready: dict[str, Session] = {}
        self.decoding: dict[str, Session] = {}
        self.released: list[str] = []
        self.rounds: list[OpenRound] = []  # under way, oldest first
        self.closed: OpenRound | None = None  # the last one that ended, if the next follows at once
        self.received_at = now  # when the last one ended
        self.num_cohorts = 1
        self.cohorts = CohortChoice(StepProfile.of(description.step_rows, description.step_times_s))
        self.step_time_s = 0.0  # running mean of decode steps, with the way there and back
        self.wire_time_s = 0.0  # running mean of the rounds' times outside their steps
        self.has_reported = False  # it has gauges of its own
        self.num_rounds = 0
        self.asked = NO_DRAFTS  # what residents were asked for with the last batch
        self.waited_in_round = -_WAITING_ROUNDS  # the last one that waited for drafts
        self._max_frame_tokens = max_frame_tokens
        self._outbox: deque[VerifyFrame] = deque()
        self._wake = asyncio.Event()
        self._is_sending = False

    @property
    def kinds_of_residents(self) -> tuple[bool, ...]:
        """Look-ups and models, as `Ask.with_models` tells them apart; empty = there are none."""
        return tuple(sorted({not each.is_look_up for each in self.residents.values()}))

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def tends_to_wait(self) -> bool:
        """Whether one of the last batches waited for drafts."""
        return self.num_rounds - self.waited_in_round < _WAITING_ROUNDS

    @property
    def is_owed(self) -> bool:
        """Whether the target has something to answer."""
        return bool(self.decoding or self.prefilling)

    @property
    def room(self) -> int:
        """How many sequences the next batch may hold; 0: none may be sent now.

        None while as many batches as there are cohorts are being computed: sequences that become
        ready meanwhile share the next step.  Answers to earlier batches do not count, so that
        batches which ever came to be under way together are one again after a round.  But what a
        step has left unanswered (rows or pages ran out) holds up nobody: the pages that it waits
        for may be those of the sequences that are ready.
        """
        num_stepping = sum(not each.stepping.isdisjoint(self.decoding) for each in self.rounds)
        if num_stepping >= self.num_cohorts:
            return 0
        if self.num_cohorts == 1:
            return len(self.ready)
        half = -(-(len(self.decoding) + len(self.ready)) // 2)
        return 0 if num_stepping and len(self.ready) < _MIN_COHORT * half else half

    def round_of(self, session_id: str) -> OpenRound | None:
        """The batch under way in which the session is not answered yet."""
        return next((each for each in self.rounds if session_id in each.pending), None)

    def has_room(self) -> bool:
        limit = self.description.max_running_sequences
        return limit == 0 or len(self.sessions) < limit

    def drop(self, session: Session) -> None:
        """Forget `session` in every state; the target hears of it by `released`."""
        for table in (self.sessions, self.unsent, self.prefilling, self.ready, self.decoding):
            table.pop(session.id, None)
        opened = self.round_of(session.id)
        if opened is not None:
            opened.stepping.discard(session.id)
            self.answered(session.id)

    def answered(self, session_id: str) -> OpenRound | None:
        """The session is not in flight any more; returns the batch it was in."""
        self.decoding.pop(session_id, None)
        opened = self.round_of(session_id)
        if opened is not None:
            opened.pending.discard(session_id)
        return opened

    def status(self) -> dict[str, object]:
        """A plain picture of the moment, for status reports."""
        return {
            "id": self.id,
            "sessions": len(self.sessions),
            "prefilling": len(self.prefilling) + len(self.unsent),
            "ready": len(self.ready),
            "decoding": len(self.decoding),
            "step_time_s": self.step_time_s,
        }

    def record_step_time(
        self, step_time_s: float, planned_s: float = 0.0, way_s: float | None = None
    ) -> float:
        """A step of decoding alone took so long; returns what its round took.

        planned_s: for planning it.  way_s: of its frames, there and back; None = the usual time.
        """
        if way_s is None:
            way_s = self.wire_time_s
        else:
            weight = _STEP_TIME_WEIGHT if self.wire_time_s else 1.0
            self.wire_time_s += weight * (way_s - self.wire_time_s)
        round_time_s = planned_s + step_time_s + way_s
        weight = _STEP_TIME_WEIGHT if self.step_time_s else 1.0
        self.step_time_s += weight * (round_time_s - self.step_time_s)
        return round_time_s

    def note_stall(self) -> None:
        """A resident has stalled: the round that waits for it, or did, is left out."""
        for opened in self.rounds:
            opened.leave_out_stall(self.planned_s)
        self.has_stalled = not self.rounds

    def send_again(self, session: Session) -> None:
        """Queue the item that the session has in flight once more."""
        assert session.in_flight is not None
        opened = self.round_of(session.id)
        if opened is not None:
            opened.is_clean = False  # its round trip says nothing any more
        session.sends_params = True  # whoever lost the item may have lost them, too
        self.post((), (session.item(session.in_flight.tree),))

    def post(self, batch: Sequence[VerifyItem], prefills: Sequence[VerifyItem]) -> None:
        """Queue frames: `batch` in one, prefills beside it as far as frame sizes allow."""
        items = list(batch)
        is_apart = bool(batch) and self.num_cohorts > 1
        room = self._max_frame_tokens - sum(len(item.delta) + 3 * len(item.tree) for item in items)
        for item in prefills:
            if items and len(item.delta) > room:
                self._outbox.append(VerifyFrame(tuple(items), self._take_released(), is_apart))
                items, room, is_apart = [], self._max_frame_tokens, False
            items.append(item)
            room -= len(item.delta)
        if items or self.released:
            self._outbox.append(VerifyFrame(tuple(items), self._take_released(), is_apart))
        if self._outbox:
            self._wake.set()

    async def flush(self) -> None:
        """Send what is queued; raises WorkerError when the link is down.

        The reader of verdicts calls it right after forming a batch, which saves the round a trip
        through the event loop; everyone else leaves it to `send_forever`.
        """
        if self._is_sending:
            return  # whoever is sending takes the new frames along
        self._is_sending = True
        try:
            while self._outbox:
                await self.link.send(self._outbox.popleft())
        finally:
            self._is_sending = False

    async def send_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    def _take_released(self) -> tuple[str, ...]:
        released = tuple(self.released)
        self.released.clear()
        return released
