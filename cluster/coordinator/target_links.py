"""The links to targets: takes targets in, reads what they answer, leaves those that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.adapters import AdapterNews
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.relay import Relay
from cluster.coordinator.sessions import SessionTable
from cluster.coordinator.step_log import StepLog
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.workers import check_target, limits_of, run_link
from cluster.messages import StepFrame, VerdictFrame, WorkerDescription
from cluster.rpc.duplex import run_until_first_ends
from cluster.rpc.link import Link

log = logging.getLogger(__name__)

# A process that was itself stopped, or starved, has heard nobody meanwhile: of the time between two
# looks no more than this counts as anyone's silence.
_MAX_LAPSE_S = 1.0
# What is queued for a target when the coordinator stops is worth no longer wait.
_FLUSH_GRACE_S = 1.0
# How often a target hears which texts it is to have.
_HEARTBEAT_S = 1.0


class TargetLinks:
    """One task per target; whatever a target does, no other one is hurt."""

    def __init__(
        self,
        settings: CoordinatorConfig,
        table: SessionTable,
        relay: Relay,
        pool: DrafterPool,
        log_of_steps: StepLog,
        adapters: AdapterNews,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._adapters = adapters
        self._relay = relay
        self._pool = pool
        self._log = log_of_steps
        self._patience_s = settings.target_silence_s, settings.target_timeout_s
        self._max_frame_tokens = settings.max_frame_tokens
        self._clock = clock
        self._tasks: dict[TargetSeat, asyncio.Task[None]] = {}
        self._looked_at = self._beaten_at = clock()

    @property
    def seats(self) -> list[TargetSeat]:
        return list(self._table.seats.values())

    def check(self, description: WorkerDescription) -> None:
        """Raise ProtocolError when a target does not fit the others."""
        check_target(description, (seat.description for seat in self.seats))

    def add(
        self, target_id: str, description: WorkerDescription, link: Link[StepFrame, VerdictFrame]
    ) -> asyncio.Task[None]:
        """Give a target that was checked work from now on; the task ends when it has left."""
        seat = TargetSeat(target_id, description, link, self._max_frame_tokens)
        self._table.seats[target_id] = seat
        self._pool.replicas.meet_residents(seat)
        self._update_limits()
        log.info("target joined id=%s model=%s", target_id, description.model_hash[:12])
        self._table.admit()
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

    def tick(self, now: float) -> None:
        """Leave targets that have not been heard of for too long, and let the others hear; to be
        called twice a second or so."""
        elapsed_s = min(now - self._looked_at, _MAX_LAPSE_S)
        self._looked_at = now
        is_beat_due = now - self._beaten_at >= _HEARTBEAT_S
        if is_beat_due:
            self._beaten_at = now
        for seat in self.seats:
            seat.liveness.missed(elapsed_s, has_work=bool(seat.sessions))
            if why := seat.liveness.why_leave(*self._patience_s):
                log.error("target is left id=%s: it %s", seat.id, why)
                self.remove(seat.id)
            elif is_beat_due:
                seat.beat()

    def _update_limits(self) -> None:
        """Serve what every target can; without targets, what the last ones could."""
        limits = limits_of(seat.description for seat in self.seats)
        if limits is not None:
            self._table.limits = limits

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
            seat.liveness.heard(frame)
            if self._table.seats.get(seat.id) is seat:
                if frame.adapters is not None:
                    self._adapters.said(seat.id, frame.adapters)
                if frame.engines:
                    self._log.renew_engines(seat, frame.engines)
            self._relay.take(seat, frame)
            self._table.admit()
            # Clients and drafters hear of it first.
            await asyncio.sleep(0)
            self._log.settle()

    def _lose(self, seat: TargetSeat) -> None:
        if self._table.seats.get(seat.id) is seat:
            log.info("target left id=%s sessions=%d", seat.id, len(seat.sessions))
            self._table.lose_seat(seat)
            self._pool.replicas.lose_residents(seat)
            self._log.forget(seat)
            self._adapters.left(seat.id)
            self._update_limits()
