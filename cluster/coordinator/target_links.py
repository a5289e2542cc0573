"""The links to targets: takes targets in, reads what they answer, leaves those that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.config import CoordinatorConfig
from cluster.coordinator.adapters import AdapterNews
from cluster.coordinator.controller import Controller
from cluster.coordinator.liveness import Liveness, Overdue
from cluster.coordinator.residents import ResidentDrafters
from cluster.coordinator.round_log import RoundLog
from cluster.coordinator.rounds import RoundLoop
from cluster.coordinator.sessions import SessionTable
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.workers import check_target, limits_of, run_link
from cluster.errors import WorkerError
from cluster.messages import VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.duplex import run_until_first_ends
from cluster.rpc.link import Link
from cluster.spec.step_profile import StepProfile

log = logging.getLogger(__name__)

# A process that was itself stopped, or starved, has heard nobody meanwhile: of the time between two
# looks no more than this counts as anyone's silence.
_MAX_LAPSE_S = 1.0
# What is queued for a target when the coordinator stops is worth no longer wait.
_FLUSH_GRACE_S = 1.0
# Turns of the event loop within which a verdict is committed and the next batch is under way.
_FORMING_TURNS = 6


class TargetLinks:
    """One task per target; whatever a target does, no other one is hurt."""

    def __init__(
        self,
        settings: CoordinatorConfig,
        table: SessionTable,
        rounds: RoundLoop,
        residents: ResidentDrafters,
        controller: Controller,
        log_of_rounds: RoundLog,
        adapters: AdapterNews,
        max_frame_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._adapters = adapters
        self._rounds = rounds
        self._residents = residents
        self._controller = controller
        self._log = log_of_rounds
        self._liveness = Liveness(settings.target_silence_s, settings.target_timeout_s)
        self._num_cohorts = 2 if settings.cohorts == "two" else 1
        self._max_frame_tokens = max_frame_tokens
        self._clock = clock
        self._tasks: dict[TargetSeat, asyncio.Task[None]] = {}
        self._looked_at = clock()
        self._num_forming = 0  # targets that wait for their next batch while it is formed

    @property
    def seats(self) -> list[TargetSeat]:
        return list(self._table.seats.values())

    def check(self, description: WorkerDescription) -> None:
        """Raise ProtocolError when a target does not fit the others."""
        check_target(description, (seat.description for seat in self.seats))

    def add(
        self, target_id: str, description: WorkerDescription, link: Link[VerifyFrame, VerdictFrame]
    ) -> asyncio.Task[None]:
        """Give a target that was checked work from now on; the task ends when it has left."""
        seat = TargetSeat(target_id, description, link, self._max_frame_tokens, self._clock())
        seat.num_cohorts = self._num_cohorts
        self._residents.join(seat)
        self._table.seats[target_id] = seat
        profile = StepProfile.of(description.step_rows, description.step_times_s)
        self._controller.meet(target_id, profile, description.draft_times)
        self._update_limits()
        log.info("target joined id=%s model=%s", target_id, description.model_hash[:12])
        self._table.admit()
        self.dispatch_touched()
        task = self._tasks[seat] = asyncio.create_task(self._run(seat))
        return task

    def remove(self, target_id: str) -> None:
        """Stop using a target; its sessions move.  An unknown id is no error."""
        seat = self._table.seats.get(target_id)
        if seat is not None:
            self._lose(seat)
            self._tasks[seat].cancel()

    async def stop(self) -> None:
        """Send what is queued, and leave every target."""
        flushes = [asyncio.create_task(seat.flush()) for seat in self.seats]
        if flushes:
            await asyncio.wait(flushes, timeout=_FLUSH_GRACE_S)
        tasks = [*flushes, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def leave_silent(self, now: float) -> None:
        """Act on what has not been heard of for too long; to be called twice a second or so."""
        elapsed_s = min(now - self._looked_at, _MAX_LAPSE_S)
        self._looked_at = now
        for seat in self.seats:
            self._attend(seat, self._liveness.pass_time(seat, elapsed_s))

    def dispatch_touched(self) -> None:
        """Queue what targets must hear of sessions that came, went or moved."""
        while self._table.touched:
            self._rounds.dispatch(self._table.touched.pop())

    async def wait_sent(self) -> None:
        """Return when no batch is being formed that a target waits for, or some turns later."""
        for _ in range(_FORMING_TURNS):  # a target that takes nothing holds up nobody's events
            await asyncio.sleep(0)
            if not self._num_forming:
                return

    def _attend(self, seat: TargetSeat, overdue: Overdue) -> None:
        """Do something about what a target has not answered in time."""
        if overdue.why_left:
            log.error("target is left id=%s: it %s", seat.id, overdue.why_left)
            self.remove(seat.id)
            return
        for session in overdue.again:
            log.warning("an item is lost at target id=%s; it is sent again", seat.id)
            seat.send_again(session)
        for session in overdue.lost:
            error = WorkerError(f"target {seat.id} does not answer for this request")
            self._table.relocate(session, error)
        if overdue.lost:
            self._table.admit()

    def _update_limits(self) -> None:
        """What every target can serve; without targets, what the last ones could."""
        limits = limits_of(seat.description for seat in self.seats)
        if limits is not None:
            self._table.limits = self._rounds.limits = limits

    async def _run(self, seat: TargetSeat) -> None:
        try:
            work = run_until_first_ends(self._read_all(seat), seat.send_forever())
            await run_link(work, f"target id={seat.id}")
        finally:
            self._tasks.pop(seat, None)
            self._lose(seat)
            await seat.link.close()

    async def _read_all(self, seat: TargetSeat) -> None:
        async for frame in seat.link:
            self._liveness.heard(seat, frame)
            if frame.adapters is not None and self._table.seats.get(seat.id) is seat:
                self._adapters.said(seat.id, frame.adapters)
            if frame.is_heartbeat:
                continue
            self._num_forming += 1
            try:
                await self._answer(seat, frame)
            finally:
                self._num_forming -= 1
            # An in-process target reads its frame now, and ingresses send theirs; what follows
            # runs beside the step.
            for _ in range(3):
                await asyncio.sleep(0)
            self._log.settle()

    async def _answer(self, seat: TargetSeat, frame: VerdictFrame) -> None:
        """Commit what a target has said, and send it the next batch."""
        self._rounds.take(seat, frame, self._clock())
        self._table.touched.add(seat)
        self._table.admit()
        if seat.tends_to_wait:
            # The next batch may well wait, too: drafters begin while it is planned,
            # when their frames are made (the first turn) and written (the second).
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self.dispatch_touched()
        await seat.flush()
        # Its frame is written in the next turn.
        await asyncio.sleep(0)

    def _lose(self, seat: TargetSeat) -> None:
        if self._table.seats.get(seat.id) is seat:
            log.info("target left id=%s sessions=%d", seat.id, len(seat.sessions))
            self._rounds.abandon(seat)
            self._table.lose_seat(seat)
            self._residents.leave(seat)
            self._log.forget(seat)
            self._liveness.forget(seat)
            self._adapters.left(seat.id)
            self._update_limits()
            self.dispatch_touched()
