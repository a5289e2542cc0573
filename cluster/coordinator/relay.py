"""Commits what targets say, and tells it to the clients and to the pool's drafters.

Nothing is asked of a target in return: it runs its texts by itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.session import Session
from cluster.coordinator.sessions import SessionTable
from cluster.coordinator.step_log import StepLog
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.verdicts import problem_of
from cluster.errors import CapacityError, ProtocolError, RequestError, error_from_code
from cluster.messages import Heartbeat, Refusal, TextName, TextVerdict, VerdictFrame
from cluster.plan.fence import Fence

log = logging.getLogger(__name__)


class Relay:
    """Takes in the frames of all targets."""

    def __init__(
        self,
        table: SessionTable,
        pool: DrafterPool,
        log_of_steps: StepLog,
        fence: Fence,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._pool = pool
        self._log = log_of_steps
        self._statistics = fence.section("statistics")
        self._clock = clock

    def take(self, seat: TargetSeat, frame: VerdictFrame) -> None:
        """Commit what the target has said."""
        now = self._clock()
        for verdict in frame.verdicts:
            session = _answered(seat, verdict.request_id, verdict.generation)
            if session is not None:
                self._take_verdict(seat, session, verdict, now)
        for refusal in frame.refusals:
            session = _answered(seat, refusal.request_id, refusal.generation)
            if session is not None:
                self._take_refusal(seat, session, refusal)
        seat.note_received(frame.serial)
        if frame.heartbeat is not None:
            self._take_heartbeat(seat, frame.heartbeat)
        if frame.load is not None:
            seat.note_load(frame.load)
        if frame.report is not None:
            self._log.note_report(seat, frame.report)
        seat.page = frame.page or seat.page
        if frame.status:
            with self._statistics:
                seat.state = dict(json.loads(frame.status))

    def _take_verdict(
        self, seat: TargetSeat, session: Session, verdict: TextVerdict, now: float
    ) -> None:
        if verdict.context_len < len(session.tokens):
            return  # it came twice
        if verdict.context_len > len(session.tokens):
            log.warning("a verdict was lost target=%s; the text begins anew from here", seat.id)
            self._table.reopen(session)
            return
        problem = problem_of(verdict, session, self._table.limits.vocab_size)
        if problem is not None:
            error = ProtocolError(f"target {seat.id} sent a verdict that cannot be: {problem}")
            self._table.relocate(session, error)
            return
        position, reason = session.num_output_tokens, verdict.finish_reason
        if not verdict.beams:
            session.tokens.append(verdict.token_ids)
        with self._statistics:
            session.count(verdict, now)
            session.stepped(_used(session, verdict))
            session.plain_steps[verdict.why] += 1
        if not session.has_answered:
            session.has_answered = True
            session.num_cached = session.num_cached or min(verdict.num_cached, session.prompt_len)
        session.num_retries = session.num_reopened = 0
        session.redraws += verdict.redraws
        if not session.is_audit:
            self._log.note_verdict(session, verdict, now)
            if session.max_draft_tokens > 0 and session.last_event_at is not None:
                wait_s = now - session.last_event_at
                self._table.switchback.note(len(verdict.token_ids), wait_s)
        session.last_event_at = now
        if reason is not None:
            seat.ended(session)
            self._table.finish(session, reason)
        session.deliver(session.event(position, verdict, reason))
        if reason is None:
            self._pool.commit(session, now)

    def _take_refusal(self, seat: TargetSeat, session: Session, refusal: Refusal) -> None:
        error = error_from_code(refusal.code, refusal.message)
        seat.ended(session)
        if isinstance(error, RequestError):
            self._table.fail(session, error)
        elif isinstance(error, CapacityError):
            seat.note_full()
            self._table.put_back(session)
        else:
            self._table.relocate(session, error)

    def _take_heartbeat(self, seat: TargetSeat, beat: Heartbeat) -> None:
        named = set(beat.texts)
        for session in list(seat.sessions.values()):
            is_known = 0 < session.opened_serial <= beat.heard
            if is_known and TextName(session.id, session.generation) not in named:
                log.warning("a text is lost target=%s; it begins anew from here", seat.id)
                self._table.reopen(session)


def _answered(seat: TargetSeat, session_id: str, generation: int) -> Session | None:
    """The session an answer is for, or None when it is stale or unknown."""
    session = seat.sessions.get(session_id)
    return session if session is not None and session.generation == generation else None


def _used(session: Session, verdict: TextVerdict) -> list[str]:
    """The drafters that had proposed what was verified."""
    counts = zip(session.names, verdict.verified, strict=False)
    return [name for name, count in counts if count]
