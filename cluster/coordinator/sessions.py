"""The coming and going of sessions: admission, places, failover, and every way to end."""

from __future__ import annotations

import bisect
import itertools
import logging

from cluster import metrics
from cluster.coordinator.admission import (
    allowed_drafters,
    check_request,
    choose_seat,
    helpers,
    with_law,
)
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.present import Ended, Present
from cluster.coordinator.session import MAX_LOST_IN_A_ROW, Deliver, Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import EMPTY_TOKENS, FinishReason, Request, TokenEvent
from cluster.errors import (
    CapacityError,
    DrafthouseError,
    RequestError,
    UnavailableError,
    WorkerError,
)
from cluster.plan.texts import MAX_DRAFTERS
from cluster.requests.idle import OF_STEPS, IdleReason
from cluster.rpc.messages import Load, error_event
from cluster.spec import evidence

log = logging.getLogger(__name__)

_MAX_RETRIES_IN_A_ROW = 3
# Drafters that are not there so long after the coordinator's start do not just load.
_LOADING_S = 120.0
# Bounds of Retry-After.
_LEAST_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
# Requests differ: a place may come so much later than their mean lets expect.
_WAIT_MARGIN = 2.0


class SessionTable:
    """All live sessions of a coordinator, those with a place and those that wait for one."""

    def __init__(self, present: Present, pool: DrafterPool) -> None:
        self._present = present
        self._pool = pool
        # First come, first served: sessions that lost their target come back to the front.
        self._line: list[Session] = []
        # Never repeated within this process, so an answer meant for an earlier owner, or for an
        # earlier request of the same id, is always recognised.
        self._generations = itertools.count(1)
        self._mean_duration_s = 0.0  # of those that were not waiting, 0 = none has ended yet
        self._started_at = self._unserved_since = present.clock()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        return len(self._present.sessions) - len(self._line)

    @property
    def num_seats(self) -> int:
        """How many texts the targets would run for this coordinator."""
        return sum(seat.num_seats for seat in self._present.seats.values())

    def load(self) -> Load:
        """How busy it is, as every ingress is told."""
        return Load(self.num_seats, self.num_running, self.num_waiting)

    def open(self, session_id: str, request: Request, deliver: Deliver) -> None:
        """Admit a request, or raise RequestError or CapacityError before any work is done."""
        config = self._present.config
        request = with_law(request, config.coordinator.laws)
        if session_id in self._present.sessions:
            raise RequestError(f"a request with id {request.id!r} is running already", param="id")
        check_request(request, self._present.served, config)
        if not request.was_admitted:
            self._check_line(request)
        session = self._session(session_id, request, deliver)
        options, limit = request.speculation, config.coordinator.max_draft_tokens
        if options.max_draft_tokens is not None:
            limit = min(limit, options.max_draft_tokens)
        if options.enabled and limit > 0 and session.is_drawn:
            session.text.names = helpers(config, request)[:MAX_DRAFTERS]
            session.text.max_draft_tokens = limit
            self._pool.roster.assign(session.text)
        if session.remaining <= 0:  # resumed at its very end
            self.cancel(session_id, FinishReason.LENGTH)
            return
        self._wait(session)
        self.admit()

    def audit(self, request: Request, deliver: Deliver, shunned_target: str) -> Session:
        """Run a text that is given; nothing of it is counted.

        shunned_target: at another target, if there is one."""
        session = self._session(request.id, request, deliver)
        session.is_audit, session.shunned_target = True, shunned_target
        self._wait(session)
        self.admit()
        return session

    def _session(self, session_id: str, request: Request, deliver: Deliver) -> Session:
        session = Session(session_id, request, deliver, self._present.clock())
        self._present.sessions[session_id] = session
        session.limit(self._present.served.max_context_len)
        return session

    def _wait(self, session: Session) -> None:
        bisect.insort(
            self._line,
            session,
            # Who has queued at another coordinator, and may have half of its text, goes first.
            key=lambda each: (not each.request.was_admitted, each.arrived_at),
        )

    def cancel(self, session_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Free everything held for a session, and let another have its place; unknown and finished
        ones are no error."""
        session = self._present.sessions.get(session_id)
        if session is not None:
            self._cancel(session, reason)
            self.admit()

    def cancel_all(self) -> None:
        """Free everything; nobody gets a place any more."""
        for session in list(self._present.sessions.values()):
            self._cancel(session, FinishReason.CANCELLED)

    def _cancel(self, session: Session, reason: FinishReason) -> None:
        self.finish(session, reason)
        position = session.num_output_tokens
        end = TokenEvent(session.request.id, position, EMPTY_TOKENS, finish_reason=reason)
        session.deliver(session.last(end))

    def finish(self, session: Session, reason: FinishReason) -> None:
        """Free what is held for `session` here, at its target and at its drafters."""
        del self._present.sessions[session.id]
        now, target_id = self._present.clock(), session.target_id
        self._leave(session)
        session.is_over = True
        self._pool.release(session)
        uptime_s = now - self._started_at
        session.idle_because = idle_reason(session, self._present, self._pool, uptime_s)
        if session.is_audit:
            return
        self._present.post(Ended(session, reason, now, target_id))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            duration_s = now - session.arrived_at - session.queue_time_s
            weight = evidence.RECENT if self._mean_duration_s else 1.0
            self._mean_duration_s += weight * (duration_s - self._mean_duration_s)

    def fail(self, session: Session, error: DrafthouseError) -> None:
        """End `session` with an error event."""
        self.finish(session, FinishReason.ERROR)
        position = session.num_output_tokens
        session.deliver(session.last(error_event(session.request.id, error, position)))

    def relocate(self, seat: TargetSeat, session: Session, error: DrafthouseError) -> None:
        """Its target could not serve it: try another one, or the same again, a few times."""
        log.warning("target refused a request, try %d: %s", session.num_retries + 1, error.message)
        session.shunned_target = seat.id
        self._retry(session, error)

    def _retry(self, session: Session, error: DrafthouseError) -> None:
        session.num_retries += 1
        if session.num_retries > _MAX_RETRIES_IN_A_ROW:
            self.fail(session, error)
        else:
            self.put_back(session)

    def put_back(self, session: Session) -> None:
        """It has no place any more, and waits for one."""
        self._leave(session)
        self._wait(session)

    def reopen(self, seat: TargetSeat, session: Session) -> None:
        """Let its target begin it anew, from what is known here; one that loses it again and again
        is no place for it."""
        session.num_reopened += 1
        if session.num_reopened > MAX_LOST_IN_A_ROW:
            session.num_reopened = 0
            error = WorkerError(f"target {seat.id} loses the text again and again")
            self.relocate(seat, session, error)
            return
        session.generation = next(self._generations)
        seat.open(session)

    def lose_seat(self, seat: TargetSeat) -> None:
        """The target is gone; its sessions are prefilled again wherever there is room: there too,
        should only its link have broken."""
        del self._present.seats[seat.id]
        self._unserved_since = self._present.clock()
        lost = list(seat.sessions.values())
        self._present.recorder.add(metrics.FAILOVERS, len(lost))
        for session in lost:
            seat.forget(session)  # what it has said and nobody has read yet counts no more
            # A request that brings down every target it meets must not go round for ever.
            self._retry(session, WorkerError("every target that took the request was lost"))
        self.admit()

    def admit(self) -> None:
        """Give places to those who wait, first come first served, while there are any."""
        limit = self._share_of(self._present.config.coordinator.max_running_sequences)
        while self._line and self.num_running < limit:
            seat = choose_seat(self._line[0], self._present.seats.values())
            if seat is None:
                return
            self._place(self._line.pop(0), seat)

    def tick(self, now: float) -> None:
        """Without any target, let those go who have waited for too long."""
        timeout_s = self._present.config.coordinator.target_timeout_s
        for session in [] if self._present.seats else list(self._line):
            if now - max(session.arrived_at, self._unserved_since) >= timeout_s:
                waited = f"no target has been available for {timeout_s:g} s; ask again later"
                self.fail(session, UnavailableError(waited))

    def _check_line(self, request: Request) -> None:
        """Raise CapacityError where the request has no place and cannot wait for one."""
        limits, num_waiting = self._present.config.coordinator, len(self._line)
        limit = self._share_of(limits.max_running_sequences)
        has_room = any(seat.has_room() for seat in self._present.seats.values())
        if has_room and not num_waiting and self.num_running < limit:
            return
        # Between two places that become free, by how long requests have taken lately.
        gap_s = self._mean_duration_s / max(self.num_running, 1)
        retry_after_s = min(max(gap_s, _LEAST_RETRY_S), _MOST_RETRY_S)
        waiting_tokens = sum(len(session.tokens) for session in self._line)
        num_tokens = waiting_tokens + len(request.prompt_ids) + len(request.output_ids)
        wait_s = (num_waiting + 1) * gap_s
        if num_waiting >= self._share_of(limits.max_queued_requests):
            what, remedy = f"{num_waiting} are waiting", "raise coordinator.max_queued_requests"
        elif num_waiting and num_tokens > self._share_of(limits.max_queued_tokens):
            what = f"{waiting_tokens} tokens of {num_waiting} prompts are waiting"
            remedy = "raise coordinator.max_queued_tokens"
        elif 0 < request.timeout_s < _WAIT_MARGIN * wait_s + self._mean_duration_s:
            # Who would be late anyway must not take the places of those who would not.
            what = f"a place may take {_WAIT_MARGIN * wait_s:.1f} s"
            remedy = f"allow more than {request.timeout_s:.1f} s"
        else:
            return
        raise CapacityError(
            f"{self.num_running} requests are running and {what}; ask again in "
            f"{retry_after_s:.0f} s or {remedy}",
            retry_after_s=retry_after_s,
        )

    def _share_of(self, limit: int) -> int:
        """Return this coordinator's part of a limit of all of them: as large as its part of the
        targets' seats, and without any targets the same for each."""
        own, everybody = 1, self._present.config.coordinator.replicas
        if self._present.seats:
            own = self.num_seats
            everybody = sum(seat.max_seats for seat in self._present.seats.values())
        return -(-limit * own // everybody)

    def _place(self, session: Session, seat: TargetSeat) -> None:
        limit = self._present.served.max_context_len
        session.limit(limit)
        if session.remaining <= 0:
            # It was admitted while no target had told its context limit yet.
            message = f"the prompt has {len(session.tokens)} tokens, the context limit is {limit}"
            self.fail(session, RequestError(f"{message}; shorten the prompt", param="prompt"))
            return
        if not session.generation:
            session.queue_time_s = self._present.clock() - session.arrived_at
        session.generation = next(self._generations)
        seat.open(session)
        # Drafters on other devices read the prompt while the target does.
        self._pool.commit(session)

    def _leave(self, session: Session) -> None:
        """Take `session` out of its seat or of the line."""
        seat = self._present.seats.get(session.target_id)
        session.target_id = ""
        if seat is not None:
            seat.drop(session)
        elif session in self._line:
            self._line.remove(session)


def idle_reason(
    session: Session, present: Present, pool: DrafterPool, uptime_s: float
) -> IdleReason:
    """Return what kept a request from having a speculative step; of several things, the one that
    did so in most steps.  uptime_s: since the coordinator started."""
    config, steps = present.config, session.plain_steps
    names = {*allowed_drafters(config, session.request)}
    if not session.text.max_draft_tokens or (config.drafters and not names):
        return IdleReason.DISABLED
    if names <= present.refused.keys():
        return IdleReason.NO_DRAFTER_FOR_MODEL
    if names.isdisjoint(pool.usable()):
        # Those that are not there may still come.
        are_loading = names.isdisjoint(pool.seen) and uptime_s < _LOADING_S
        return IdleReason.WARMING_UP if are_loading else IdleReason.DRAFTERS_DOWN
    why, reason = max(OF_STEPS.items(), key=lambda each: steps[each[0]])
    return reason if steps[why] else IdleReason.TOO_SHORT
