"""The targets' part of a coordinator: commits what they answer, and leaves those that are lost.

Nothing is asked of a target in return: it runs its texts by itself.  What one answers is checked
before it changes anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math

from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.present import Answered, Present, Stepped
from cluster.coordinator.session import Session
from cluster.coordinator.sessions import SessionTable
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.workers import TARGET_CONFIG, served_by_all
from cluster.errors import CapacityError, ProtocolError, RequestError, error_from_code
from cluster.plan.fence import Fence
from cluster.requests.fields import StepCount
from cluster.rpc.messages import (
    Heartbeat,
    Refusal,
    StepReport,
    TextVerdict,
    VerdictFrame,
)
from cluster.spec.tree_check import num_ids

log = logging.getLogger(__name__)


class TargetLinks:
    """Takes in the frames of all targets; whatever a target does, no other one is hurt."""

    def __init__(self, present: Present, table: SessionTable, pool: DrafterPool) -> None:
        self._present = present
        self._table = table
        self._pool = pool
        self._statistics = Fence(present.recorder, "statistics")

    def update(self) -> None:
        """Serve what every target can; without targets, what the last ones could."""
        present, seats = self._present, list(self._present.seats.values())
        if seats:
            lengths = [each.description.max_context_len for each in seats]
            shortest = min(filter(None, lengths), default=0)
            first = seats[0].description
            present.served = dataclasses.replace(first, max_context_len=shortest)
        said = [each.adapters for each in seats if each.adapters is not None]
        if said and (found := served_by_all(said)) != present.adapters:
            present.adapters, present.refused[TARGET_CONFIG] = found, found.refused
            for tell in present.ingresses:
                tell()

    async def read_all(self, seat: TargetSeat) -> None:
        """Take in what a target says."""
        async for frame in seat.link:
            self._take(seat, frame)
            self._table.admit()
            # Clients and drafters hear of it first.
            await asyncio.sleep(0)
            self._present.settle()

    def lose(self, seat: TargetSeat) -> None:
        """Stop using a target, if it is there; its sessions move."""
        if self._present.seats.get(seat.id) is seat:
            log.info("target left id=%s sessions=%d", seat.id, len(seat.sessions))
            self._table.lose_seat(seat)
            self.update()

    def _take(self, seat: TargetSeat, frame: VerdictFrame) -> None:
        """Commit what the target has said."""
        answers: tuple[TextVerdict | Refusal, ...] = (*frame.verdicts, *frame.refusals)
        for answer in answers:
            session = seat.sessions.get(answer.request_id)
            if session is None or session.generation != answer.generation:
                continue
            if isinstance(answer, Refusal):
                self._take_refusal(seat, session, answer)
            else:
                self._take_verdict(seat, session, answer)
        seat.heard(frame)
        if frame.heartbeat is not None:
            self._take_heartbeat(seat, frame.heartbeat)
        if frame.adapters is not None:
            seat.adapters = frame.adapters
            self.update()
        if frame.engines:
            seat.description = dataclasses.replace(seat.description, engines=frame.engines)
        if frame.report is not None:
            self._take_report(seat, frame.report)
        if frame.status:
            with self._statistics:
                seat.state = dict(json.loads(frame.status))

    def _take_verdict(self, seat: TargetSeat, session: Session, verdict: TextVerdict) -> None:
        if verdict.context_len < len(session.tokens):
            return  # it came twice
        if verdict.context_len > len(session.tokens):
            log.warning("a verdict was lost target=%s; the text begins anew from here", seat.id)
            self._table.reopen(seat, session)
            return
        problem = problem_of(verdict, session, self._present.served.vocab_size)
        if problem is not None:
            error = ProtocolError(f"target {seat.id} sent a verdict that cannot be: {problem}")
            self._table.relocate(seat, session, error)
            return
        now, former_at, reason = self._present.clock(), session.last_at, verdict.finish_reason
        if not verdict.beams:
            session.tokens.append(verdict.token_ids)
        step: StepCount | None = None
        with self._statistics:
            step = session.count(verdict, now)
        if not session.has_answered:
            session.has_answered = True
            session.num_cached = session.num_cached or min(verdict.num_cached, session.prompt_len)
        session.num_retries = session.num_reopened = 0
        session.redraws += verdict.redraws
        if not session.is_audit:
            self._present.post(Answered(session, verdict, now, former_at))
        if reason is not None:
            seat.ended(session)
            self._table.finish(session, reason)
        session.deliver(session.event(verdict, step))
        if reason is None:
            self._pool.commit(session)

    def _take_refusal(self, seat: TargetSeat, session: Session, refusal: Refusal) -> None:
        error = error_from_code(refusal.code, refusal.message)
        seat.ended(session)
        if isinstance(error, RequestError):
            self._table.fail(session, error)
        elif isinstance(error, CapacityError):
            seat.is_full, session.shunned_target = True, seat.id
            self._table.put_back(session)
        else:
            self._table.relocate(seat, session, error)

    def _take_heartbeat(self, seat: TargetSeat, beat: Heartbeat) -> None:
        named = set(beat.texts)
        for session in list(seat.sessions.values()):
            is_known = 0 < session.opened_serial <= beat.heard
            if is_known and session.name not in named:
                log.warning("a text is lost target=%s; it begins anew from here", seat.id)
                self._table.reopen(seat, session)

    def _take_report(self, seat: TargetSeat, report: StepReport) -> None:
        """A report with impossible times is left out."""
        times_s = (report.step_time_s, report.forward_time_s, report.period_s, report.draft_time_s)
        if not all(math.isfinite(time_s) and time_s >= 0.0 for time_s in times_s):
            return
        seat.pages = report.pages_in_use, report.pages_total
        num_tokens = report.num_prompt_tokens + report.num_emitted_tokens
        if report.num_sequences or num_tokens or report.num_prefill_tokens:
            self._present.post(Stepped(seat.id, report))


def problem_of(verdict: TextVerdict, session: Session, vocab_size: int) -> str | None:
    """Why a verdict cannot be one of the session's text, which it continues; None = it can."""
    beams = session.request.params.beams
    token_ids, most = verdict.token_ids, num_ids(vocab_size)
    num_tokens = len(token_ids)
    if num_tokens and not 0 <= token_ids.min() <= token_ids.max() < most:
        return "a token is outside the vocabulary"
    if beams is not None:
        return _problem_of_beams(verdict, beams.num_beams)
    if verdict.beams:
        return "it has beams, the request none"
    if not num_tokens and verdict.finish_reason is None:
        return "it brings nothing"
    if num_tokens > max(session.remaining, 0):
        return f"it brings {num_tokens} tokens, {session.remaining} are left"
    if len(verdict.sources) > verdict.num_nodes:
        return f"it accepts {len(verdict.sources)} drafts of {verdict.num_nodes}"
    if len(verdict.owners) != len(verdict.sources) or not all(
        owner < len(session.text.names) for owner in verdict.owners
    ):
        return "it credits drafters that are none of the text's"
    num_asked = 0 if session.request.params.logprobs is None else num_tokens
    if len(verdict.logprobs) != num_asked:
        return f"it has {len(verdict.logprobs)} log-probabilities"
    first = session.num_output_tokens
    if not all(
        session.is_audit
        and first <= each.position < first + num_tokens
        and 0 <= each.token_id < most
        and each.gap >= 0.0
        for each in verdict.redraws
    ):
        return "it draws tokens anew where it has none"
    return None


def _problem_of_beams(verdict: TextVerdict, num_beams: int) -> str | None:
    token_ids, ends = verdict.token_ids, verdict.beams
    if not 1 <= len(ends) <= num_beams:
        return f"it has {len(ends)} beams of {num_beams}"
    if sum(end.num_tokens for end in ends) != len(token_ids):
        return "its beams have other numbers of tokens than they say"
    if verdict.logprobs and len(verdict.logprobs) != len(token_ids):
        return f"it has {len(verdict.logprobs)} log-probabilities"
    if not all(math.isfinite(end.logprob) and math.isfinite(end.score) for end in ends):
        return "a score is no number"
    return None if verdict.finish_reason is not None else "it does not end the search"
