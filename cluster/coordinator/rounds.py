"""The round loop of the targets: take in verdicts, commit them, form the next batch.

Everything here is synchronous: from a verdict's arrival to the next frame there is no trip through
the event loop.  Nothing blocks on a drafter: where the budget prices a short wait as the better
buy, the batch is simply not formed until a timer or the drafts call back (`waits.py`).  What the
next frame does not depend on (metrics, calibration) is settled after it has gone out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from cluster.config import CoordinatorConfig
from cluster.coordinator.batching import choose_batch
from cluster.coordinator.controller import Controller, any_sampled
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.fence import Fence
from cluster.coordinator.in_flight import NOT_WORTH_IT, InFlight, Moment, Plan
from cluster.coordinator.residents import ResidentDrafters
from cluster.coordinator.round_book import RoundBook
from cluster.coordinator.round_log import RoundLog
from cluster.coordinator.session import Limits, Session, Status
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.verdicts import are_beams_sound, is_credible, is_sound, is_stuck
from cluster.coordinator.waits import DraftWaits
from cluster.core import FinishReason, Verdict, VerifyItem
from cluster.errors import (
    DrafthouseError,
    ProtocolError,
    RequestError,
    WorkerError,
    error_from_code,
)
from cluster.messages import CacheMiss, Refusal, VerdictFrame
from cluster.spec.throttle import State

log = logging.getLogger(__name__)

# A target that forgets a session so often without one verdict in between will not learn it.
_MAX_MISSES_IN_A_ROW = 16


class SessionOwner(Protocol):
    """Who decides about the coming and going of sessions: the coordinator."""

    def finish(self, session: Session, reason: FinishReason) -> None:
        """The text has ended: free what is held for it.  The loop delivers the last event."""
        ...

    def fail(self, session: Session, error: DrafthouseError) -> None:
        """The request ends with `error`."""
        ...

    def relocate(self, session: Session, error: DrafthouseError) -> None:
        """Its target could not serve it; try again, elsewhere if possible."""
        ...


class RoundLoop:
    """Drives the sessions that have a place at a target."""

    def __init__(
        self,
        owner: SessionOwner,
        pool: DrafterPool,
        controller: Controller,
        log_of_rounds: RoundLog,
        waits: DraftWaits,
        residents: ResidentDrafters,
        fence: Fence,
        settings: CoordinatorConfig,
        clock: Callable[[], float],
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._controller = controller
        self._log = log_of_rounds
        self._waits = waits
        self._residents = residents
        self._max_wait_s = settings.max_homogeneity_wait_ms / 1000.0
        self._clock = clock
        self._book = RoundBook(controller, log_of_rounds, waits, settings, clock)
        self._planning = fence.section("planning")
        self._rounds = fence.section("rounds")
        self._statistics = fence.section("statistics")
        self.limits = Limits()

    def take(self, seat: TargetSeat, frame: VerdictFrame, now: float) -> None:
        """Commit what the target answered.  The caller dispatches the seat afterwards."""
        was_stepping = [(each, set(each.stepping)) for each in seat.rounds]
        for verdict in frame.verdicts:
            session = self._answered(seat, verdict.request_id, verdict.generation)
            if session is not None:
                self._take_verdict(seat, session, verdict, now)
        for miss in frame.misses:
            session = self._answered(seat, miss.request_id, miss.generation)
            if session is not None:
                self._take_miss(seat, session, miss)
        for refusal in frame.refusals:
            session = self._answered(seat, refusal.request_id, refusal.generation)
            if session is not None:
                self._take_refusal(seat, session, refusal)
        for opened, stepping in was_stepping:
            if is_stuck(frame) or not stepping <= seat.decoding.keys():
                opened.stepping.clear()
        ended = [opened for opened, _ in was_stepping if not opened.pending]
        seat.rounds = [opened for opened in seat.rounds if opened.pending]
        if frame.report is not None and is_credible(frame.report):
            self._log.note_report(seat, frame.report)
            for opened in ended:
                with self._rounds:
                    self._book.close(seat, opened, frame.report, now)
        if frame.drafts is not None:
            self._residents.receive(seat, frame.drafts, now, self.limits.vocab_size)
        answered = (seat.ready.get(verdict.request_id) for verdict in frame.verdicts)
        if any(session.asked.num_nodes for session in answered if session is not None):
            self._residents.expect(seat, frame.report, self.dispatch)

    def dispatch(self, seat: TargetSeat) -> None:
        """Queue for `seat` whatever it can be sent now: prefills at once, a batch if it is free."""
        now = self._clock() if seat.unsent else 0.0
        prefills = [self._start_prefill(seat, each, now) for each in seat.unsent.values()]
        seat.unsent.clear()
        if prefills:
            for opened in (*seat.rounds, *([seat.closed] if seat.closed else [])):
                opened.is_clean = False
        batch: list[VerifyItem] = []
        if not seat.ready:
            self.abandon(seat)
        elif seat.room and not self._residents.holds(seat) and not self._waits.holds(seat):
            batch = self._form_batch(seat)
        if batch or prefills or seat.released:
            seat.post(batch, prefills)
        if batch and seat.ready and seat.room:
            seat.post(self._form_batch(seat), ())  # the other cohort begins
        if not seat.decoding:
            seat.closed = None  # the next round will not follow this one directly

    def drafts_arrived(self, sessions: Iterable[Session]) -> None:
        """Go on where this is what a batch was waiting for."""
        for session in sessions:
            seat = self._waits.arrived(session)
            if seat is not None:
                self.dispatch(seat)

    def abandon(self, seat: TargetSeat) -> None:
        """Wait for nothing any more on behalf of `seat`."""
        self._waits.drop(seat, self._clock())

    def _answered(self, seat: TargetSeat, session_id: str, generation: int) -> Session | None:
        """The session an answer is for, or None when it is stale, doubled or unknown."""
        session = seat.sessions.get(session_id)
        if session is None or session.generation != generation or session.in_flight is None:
            return None
        return session

    def _take_verdict(
        self, seat: TargetSeat, session: Session, verdict: Verdict, now: float
    ) -> None:
        in_flight = session.in_flight
        if in_flight is None or verdict.context_len != in_flight.context_len:
            return  # it answers an older item, once more
        if not self._fits(session, verdict, in_flight):
            error = ProtocolError(f"target {seat.id} sent a verdict that does not fit its item")
            self._owner.relocate(session, error)
            return
        position = session.num_output_tokens
        reason: FinishReason | None
        if verdict.beams:  # whole texts, which nothing follows
            num_kept, reason = len(verdict.token_ids), FinishReason.STOP
        else:
            num_kept, reason = session.cut(verdict.token_ids, self.limits)
            session.tokens.append(verdict.token_ids[:num_kept])
            session.stepped(in_flight.drafters)
        with self._statistics:
            session.statistics.record_step(in_flight, verdict.path, now)
        if session.num_cached is None:
            session.num_cached = min(verdict.num_cached, session.prompt_len)
        session.in_flight = None
        session.num_misses = session.num_retries = 0
        opened = seat.answered(session.id)
        if opened is not None:
            # A stop token is not part of the text, but plain decoding would have drawn it too.
            opened.answers.append((session, num_kept + (reason is FinishReason.STOP)))
        seat.prefilling.pop(session.id, None)
        self._log.note_verdict(session, in_flight, verdict, now, num_kept)
        session.last_event_at = now
        if reason is not None:
            self._owner.finish(session, reason)
            session.deliver(session.event(position, verdict, reason, in_flight))
            return
        session.target_len = verdict.context_len + len(verdict.path)
        if session.is_scored:  # what is left of it goes like another chunk of a prefill
            session.status = Status.PREFILL
            seat.unsent[session.id] = session
        else:
            session.status = Status.READY
            session.ready_since = now
            seat.ready[session.id] = session
        self._pool.commit(session, now)
        session.deliver(session.event(position, verdict, None, in_flight))

    def _fits(self, session: Session, verdict: Verdict, in_flight: InFlight) -> bool:
        spec, vocab_size = session.request.params.beams, self.limits.vocab_size
        if spec is not None:
            return are_beams_sound(verdict, spec.num_beams, vocab_size)
        return not verdict.beams and is_sound(verdict, in_flight, vocab_size)

    def _take_miss(self, seat: TargetSeat, session: Session, miss: CacheMiss) -> None:
        if not 0 <= miss.have_len <= session.target_len:
            return  # the answer to an older item, once more
        if miss.have_len == session.target_len > 0:
            return
        self._log.note_miss()
        session.num_misses += 1
        if session.num_misses > _MAX_MISSES_IN_A_ROW:
            error = WorkerError(f"target {seat.id} cannot keep the context of a request")
            self._owner.relocate(session, error)
            return
        self._send_again(seat, session, miss.have_len)

    def _take_refusal(self, seat: TargetSeat, session: Session, refusal: Refusal) -> None:
        error = error_from_code(refusal.code, refusal.message)
        if not isinstance(error, RequestError):
            self._owner.relocate(session, error)
            return
        in_flight = session.in_flight
        if in_flight is None or len(in_flight.tree) == 0 or session.is_scored:
            self._owner.fail(session, error)
            return
        # Perhaps only its drafts were too much (pages, rows): they may never cost it its text.
        self._pool.release(session)
        session.drafters = ()
        self._send_again(seat, session, 0)

    def _send_again(self, seat: TargetSeat, session: Session, have_len: int) -> None:
        """The target holds only the first have_len tokens; send it the rest."""
        seat.answered(session.id)
        seat.prefilling.pop(session.id, None)
        session.in_flight = None
        session.target_len = have_len
        session.sends_params = True
        session.status = Status.PREFILL
        seat.unsent[session.id] = session

    def _start_prefill(self, seat: TargetSeat, session: Session, now: float) -> VerifyItem:
        session.status = Status.PREFILL
        tree = session.forced_tree(seat.description.max_batch_tokens)
        session.in_flight = InFlight(len(session.tokens), tree)
        seat.prefilling[session.id] = session
        if not session.is_scored:
            ask = self._controller.first_ask(seat.id, len(seat.sessions), session, now)
            self._residents.ask(seat, session, ask, now)
        return session.item(session.in_flight.tree)

    def _form_batch(self, seat: TargetSeat) -> list[VerifyItem]:
        now = self._clock()
        limit = min(seat.description.max_running_sequences or len(seat.ready), seat.room)
        # A step of unknown length may be longer than any wait: nobody sits it out.
        step_time_s = seat.step_time_s or math.inf
        batch = choose_batch(seat.ready.values(), now, self._max_wait_s, step_time_s, limit)
        plan: Plan | None = None
        with self._planning:
            plan = self._plan(seat, batch, now)
        if plan is None:
            # Whichever tree it failed on is not tried again, and this round is a plain one.
            self._pool.drop_trees(batch)
            plan = Plan([InFlight(len(session.tokens)) for session in batch])
        if plan.wait_s > 0.0:
            awaited = [batch[index] for index in plan.awaited]
            self._waits.begin(seat, awaited, plan.wait_s, now, self.dispatch)
            return []
        return self._items(seat, batch, plan, now)

    def _plan(self, seat: TargetSeat, batch: list[Session], now: float) -> Plan:
        row_limit = seat.description.max_batch_tokens
        max_nodes = max(row_limit - len(batch), 0) if row_limit else None
        left_s = self._waits.left_s(seat)
        if seat.num_cohorts > 1 or len(batch) < len(seat.ready):
            # Drafts had another cohort's step to come in; others have a bound of their own to keep.
            left_s = 0.0
        waited_s = self._waits.waited_s(seat, now)
        moment = Moment(now, left_s, waited_s, residents=seat.kinds_of_residents)
        # A path of k accepted nodes emits k + 1 tokens.
        max_depths = [session.remaining_tokens(self.limits) - 1 for session in batch]
        return self._controller.plan(seat.id, batch, max_depths, max_nodes, moment)

    def _items(
        self, seat: TargetSeat, batch: list[Session], plan: Plan, now: float
    ) -> list[VerifyItem]:
        """The batch as it is sent, with the drafts planned for each of its sessions."""
        items: list[VerifyItem] = []
        num_nodes = 0
        for place, (session, in_flight) in enumerate(zip(batch, plan.in_flight, strict=True)):
            del seat.ready[session.id]
            seat.decoding[session.id] = session
            session.in_flight = in_flight
            session.status = Status.DECODING
            num_nodes += len(in_flight.tree)
            self._residents.ask(seat, session, plan.ask.of(place), now)
            # Before a text's last token there is nothing to draft.
            could_draft = session.remaining_tokens(self.limits) > 1
            is_plain = could_draft and not len(in_flight.tree)
            if is_plain and not session.statistics.has_speculated:
                session.note_plain_step(
                    is_paused=plan.why in (State.PAUSE, State.PLAIN),
                    is_declined=plan.why == NOT_WORTH_IT,
                )
            items.append(session.item(in_flight.tree))
        opened = self._book.open(seat, batch, num_nodes, is_sampled=any_sampled(batch))
        seat.asked = plan.ask
        with self._rounds:
            self._book.note_opened(seat, opened, batch)
        return items
