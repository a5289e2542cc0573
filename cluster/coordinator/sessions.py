"""The coming and going of sessions: admission, places, failover, and every way to end."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.admission import WaitingLine, check_request, with_law
from cluster.coordinator.audit import Auditor
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.eligible import Eligible
from cluster.coordinator.finished import record_finished
from cluster.coordinator.idle import IdleReason, idle_reason
from cluster.coordinator.placement import Placement
from cluster.coordinator.session import Deliver, Limits, Session, Status, error_event
from cluster.coordinator.switchback import Switchback
from cluster.coordinator.targets import TargetSeat
from cluster.core import FinishReason, Request
from cluster.errors import (
    CapacityError,
    DrafthouseError,
    RequestError,
    UnavailableError,
    WorkerError,
)
from cluster.metrics.recorder import Recorder

log = logging.getLogger(__name__)

_MAX_RETRIES_IN_A_ROW = 3
_MAX_REOPENED_IN_A_ROW = 8  # a link may lose frames too
# Weight of the newest finished request in the estimate behind Retry-After, and its bounds.
_DURATION_WEIGHT = 0.1
_RETRY_AFTER_S = (1.0, 60.0)
# Requests differ: a place may come so much later than their mean lets expect.
_WAIT_MARGIN = 2.0


class SessionTable:
    """All live sessions of a coordinator, those with a place and those that wait for one."""

    def __init__(
        self,
        config: Config,
        pool: DrafterPool,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._eligible = Eligible(config)
        self._pool = pool
        self._recorder = recorder
        self._clock = clock
        self._line = WaitingLine()
        self._placement = Placement(config.target.engine.page_size)
        self._arrivals = itertools.count()
        # Never repeated within this process, so an answer meant for an earlier owner, or for an
        # earlier request of the same id, is always recognised.
        self._generations = itertools.count(1)
        self._mean_duration_s = 0.0  # of those that were not waiting, 0 = none has ended yet
        self._started_at = self._unserved_since = clock()
        self.sessions: dict[str, Session] = {}
        self.seats: dict[str, TargetSeat] = {}
        self.limits = Limits()
        self.auditor = Auditor(config, recorder, clock)
        self.switchback = Switchback(config, recorder)

    def use(self, config: Config) -> None:
        """Open requests by another configuration from now on; limits hold at once."""
        self._eligible = Eligible(config)
        self._config = config
        self.auditor.use(config)
        self.switchback.use(config)
        self.admit()

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        return len(self.sessions) - len(self._line)

    @property
    def num_seats(self) -> int:
        """How many texts the targets would run for this coordinator."""
        return sum(seat.num_seats for seat in self.seats.values())

    def open(self, session_id: str, request: Request, deliver: Deliver) -> None:
        """Admit a request, or raise RequestError or CapacityError before any work is done."""
        request = with_law(request, self._config.coordinator.laws)
        self._check(session_id, request)
        session = Session(session_id, request, deliver, next(self._arrivals), self._clock())
        options, limit = request.speculation, self._config.coordinator.max_draft_tokens
        if options.max_draft_tokens is not None:
            limit = min(limit, options.max_draft_tokens)
        if options.enabled and limit > 0 and session.is_drawn:
            session.max_draft_tokens = limit
            session.help_by(self._eligible.helpers(request))
        self.sessions[session_id] = session
        session.limit(self.limits)
        if session.remaining <= 0:  # resumed at its very end
            self._line.push(session)
            self.finish(session, FinishReason.LENGTH)
            session.deliver(session.event(session.num_output_tokens, None, FinishReason.LENGTH))
            return
        self._line.push(session)
        self.admit()

    def audit(self, request: Request, deliver: Deliver, shunned_target: str) -> Session:
        """Run a text that is given; nothing of it is counted.

        shunned_target: at another target, if there is one."""
        session = Session(request.id, request, deliver, next(self._arrivals), self._clock())
        session.is_audit, session.shunned_target = True, shunned_target
        self.sessions[session.id] = session
        session.limit(self.limits)
        self._line.push(session)
        self.admit()
        return session

    def cancel(self, session_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Free everything held for a session; unknown and finished ones are no error."""
        session = self.sessions.get(session_id)
        if session is not None:
            self.finish(session, reason)
            session.deliver(session.event(session.num_output_tokens, None, reason))

    def finish(self, session: Session, reason: FinishReason) -> None:
        """Free what is held for `session` here, at its target and at its drafters."""
        del self.sessions[session.id]
        if not session.is_audit:
            self.auditor.note(session, reason)
        self._leave(session)
        session.status = Status.FINISHED
        self._pool.release(session)
        session.idle_because = self._idle_reason(session)
        now = self._clock()
        if session.is_audit:
            return
        record_finished(self._recorder, session, now)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            duration_s = now - session.arrived_at - (session.queue_time_s or 0.0)
            weight = _DURATION_WEIGHT if self._mean_duration_s else 1.0
            self._mean_duration_s += weight * (duration_s - self._mean_duration_s)

    def fail(self, session: Session, error: DrafthouseError) -> None:
        """End `session` with an error event."""
        self.finish(session, FinishReason.ERROR)
        session.deliver(error_event(session.request.id, error, session))

    def relocate(self, session: Session, error: DrafthouseError) -> None:
        """Its target could not serve it: try another one, or the same again, a few times."""
        session.num_retries += 1
        log.warning("target refused a request, try %d: %s", session.num_retries, error.message)
        if session.num_retries > _MAX_RETRIES_IN_A_ROW:
            self.fail(session, error)
            return
        self.put_back(session)

    def put_back(self, session: Session) -> None:
        """Its target has no place for it: it waits for one, elsewhere if possible."""
        if session.target is not None:
            session.shunned_target = session.target.id
        self._put_back([session])

    def reopen(self, session: Session) -> None:
        """Let its target begin it anew, from what is known here; one that loses it again and again
        is no place for it."""
        seat = None if session.target is None else self.seats.get(session.target.id)
        if seat is None:
            return
        session.num_reopened += 1
        if session.num_reopened > _MAX_REOPENED_IN_A_ROW:
            session.num_reopened = 0
            self.relocate(session, WorkerError(f"target {seat.id} loses the text again and again"))
            return
        session.generation = next(self._generations)
        seat.open(session)

    def lose_seat(self, seat: TargetSeat) -> None:
        """The target is gone; its sessions are prefilled again wherever there is room."""
        if self.seats.get(seat.id) is seat:
            del self.seats[seat.id]
        self._placement.forget(seat.id)
        self._unserved_since = self._clock()
        lost = list(seat.sessions.values())
        if lost:
            self._recorder.add(metrics.FAILOVERS, len(lost))
        for session in lost:
            seat.drop(session)
            # A request that brings down every target it meets must not go round for ever.
            session.num_retries += 1
        self._put_back(lost)
        for session in lost:
            if session.num_retries > _MAX_RETRIES_IN_A_ROW:
                self.fail(session, WorkerError("every target that took the request was lost"))
        self.admit()

    def admit(self) -> None:
        """Give places to those who wait, first come first served, while there are any."""
        limit = self._share_of(self._config.coordinator.max_running_sequences)
        while len(self._line) and self.num_running < limit:
            seat = self._placement.choose(next(iter(self._line)), self.seats.values())
            if seat is None:
                return
            self._place(self._line.pop(), seat)

    def tick(self, now: float) -> None:
        """Without any target, let those go who have waited for too long; with some, audit."""
        timeout_s, is_plain = (
            self._config.coordinator.target_timeout_s,
            self.switchback.is_plain_now,
        )
        self.switchback.tick()
        for seat in self.seats.values():
            seat.be_plain(is_plain=is_plain)
        if self.seats:
            self.auditor.tick(self)
            return
        for session in list(self._line):
            if now - max(session.arrived_at, self._unserved_since) >= timeout_s:
                waited = f"no target has been available for {timeout_s:g} s; ask again later"
                self.fail(session, UnavailableError(waited))

    def _idle_reason(self, session: Session) -> IdleReason:
        names = self._eligible.names(session.request)
        has_some = bool(names) or not self._config.drafters
        now = self._clock()
        drafters = self._pool.replicas.availability(names, now)
        return idle_reason(
            is_enabled=session.max_draft_tokens > 0 and has_some,
            drafters=replace(drafters, uptime_s=now - self._started_at),
            steps=session.plain_steps,
        )

    def _check(self, session_id: str, request: Request) -> None:
        if session_id in self.sessions:
            raise RequestError(f"a request with id {request.id!r} is running already", param="id")
        check_request(
            request,
            self.limits,
            self._config.on_their_own,
            self._config.coordinator.latency_classes,
            self._config.coordinator.max_frame_tokens,
        )
        if request.was_admitted:
            return
        limits = self._config.coordinator
        has_place = (
            not len(self._line)
            and self.num_running < self._share_of(limits.max_running_sequences)
            and any(seat.has_room() for seat in self.seats.values())
        )
        if not has_place:
            self._check_line(request)

    def _check_line(self, request: Request) -> None:
        """Raise CapacityError where the request cannot wait for a place."""
        limits, line = self._config.coordinator, self._line
        retry_after_s = self._retry_after_s()
        num_tokens = line.num_tokens + len(request.prompt_ids) + len(request.output_ids)
        wait_s = (len(line) + 1) * self._mean_duration_s / max(self.num_running, 1)
        if len(line) >= self._share_of(limits.max_queued_requests):
            what, remedy = f"{len(line)} are waiting", "raise coordinator.max_queued_requests"
        elif len(line) and num_tokens > self._share_of(limits.max_queued_tokens):
            what = f"{line.num_tokens} tokens of {len(line)} prompts are waiting"
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

    def _retry_after_s(self) -> float:
        """Return when a place in the line will be free, by how long requests have taken lately."""
        low, high = _RETRY_AFTER_S
        return min(max(self._mean_duration_s / max(self.num_running, 1), low), high)

    def _share_of(self, limit: int) -> int:
        """Return this coordinator's part of a limit of all of them: as large as its part of the
        targets' seats, and without any targets the same for each."""
        own, everybody = 1, self._config.coordinator.replicas
        if self.seats:
            own = self.num_seats
            everybody = sum(seat.max_seats for seat in self.seats.values())
        return -(-limit * own // everybody)

    def _place(self, session: Session, seat: TargetSeat) -> None:
        session.limit(self.limits)
        if session.remaining <= 0:
            # It was admitted while no target had told its context limit yet.
            limit = self.limits.max_context_len
            message = f"the prompt has {len(session.tokens)} tokens, the context limit is {limit}"
            self.fail(session, RequestError(f"{message}; shorten the prompt", param="prompt"))
            return
        session.generation = next(self._generations)
        if session.queue_time_s is None:
            session.queue_time_s = self._clock() - session.arrived_at
        session.status = Status.RUNNING
        seat.open(session)
        self._placement.remember(seat, session)
        # Drafters on other devices read the prompt while the target does.
        self._pool.commit(session, self._clock())

    def _put_back(self, sessions: list[Session]) -> None:
        for session in sessions:
            self._leave(session)
            session.status = Status.WAITING
        self._line.put_back(sessions)

    def _leave(self, session: Session) -> None:
        """Take `session` out of its seat or of the line."""
        place, session.target = session.target, None
        # One that was lost is told nothing any more.
        seat = None if place is None else self.seats.get(place.id)
        if seat is not None:
            seat.drop(session)
            self._placement.remember(seat, session)
        elif session.status is Status.WAITING and session in self._line:
            self._line.remove(session)
