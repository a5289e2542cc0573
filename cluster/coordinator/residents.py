"""The drafters inside the targets: how many nodes they are asked for, and what they send.

What they draft is held and merged like the pool's.  They need no commits from here, for the target
knows what it has committed; and while they draft, their target computes nothing else, so that its
next batch waits for them: for a bounded time, because they may also fail to answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from cluster import metrics
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.waits import Timer, TimerHandle
from cluster.errors import WorkerError
from cluster.messages import CommitFrame, DraftReport, ProposalFrame, StepReport
from cluster.metrics import Recorder
from cluster.spec.budget import NO_DRAFTS, Ask

# How long a batch waits for residents: so many times what they took lately, or what the step took
# after which they draft, whichever is longer; at least as long as a slow turn of a busy machine.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 0.05
# Weight of the newest report in the running mean of what drafting takes.
_TIME_WEIGHT = 0.2


class ResidentDrafters:
    """Those of all targets; `TargetSeat.residents` has those of each."""

    def __init__(self, pool: DrafterPool, recorder: Recorder, timer: Timer) -> None:
        self._pool = pool
        self._recorder = recorder
        self._timer = timer
        self._due: dict[TargetSeat, TimerHandle] = {}  # targets whose residents are drafting
        self._num_hosts: Counter[str] = Counter()  # targets, by the residents' names
        self._num_asked: Counter[tuple[str, str]] = Counter()  # nodes, by drafter and task

    def join(self, seat: TargetSeat) -> None:
        """A target has joined, and its residents with it."""
        for name in seat.description.residents:
            description = replace(seat.description, role="drafter", name=name, residents=())
            resident = self._pool.replicas.host(name, seat.id, description, _NoLink())
            resident.is_look_up = name in seat.description.look_ups
            seat.residents[name] = resident
        self._count_hosts(seat, 1)

    def leave(self, seat: TargetSeat) -> None:
        """The target has left."""
        self._end_wait(seat)
        for resident in seat.residents.values():
            resident.forget_gauges(self._recorder)
            self._pool.replicas.leave(resident)
        self._count_hosts(seat, -1)

    def ask(self, seat: TargetSeat, session: Session, ask: Ask, now: float) -> None:
        """Let the residents draft for `session` after its next step."""
        session.asked = NO_DRAFTS
        nodes = min(ask.num_nodes, session.max_draft_tokens)
        if not (nodes and seat.residents):
            return
        names = [
            name
            for name in session.drafters
            if (resident := seat.residents.get(name)) is not None
            and (ask.with_models or resident.is_look_up)
            and self._may_draft(resident, session, now)
        ]
        if names:
            session.asked = Ask(nodes, ask.with_models)
            for name in names:
                self._num_asked[name, session.request.task] += nodes

    def expect(
        self, seat: TargetSeat, step: StepReport | None, expire: Callable[[TargetSeat], None]
    ) -> None:
        """Verdicts have come, and drafts are about to: hold the next batch of `seat` for them.

        step: that of the verdicts.  `expire(seat)` is called where they do not come in time.
        """
        if seat in self._due:
            return
        step_time_s = step.step_time_s if step else 0.0
        patience_s = max(_PATIENCE * max(seat.draft_time_s, step_time_s), _LEAST_PATIENCE_S)

        def time_is_up() -> None:
            self._due.pop(seat, None)
            expire(seat)

        self._due[seat] = self._timer(patience_s, time_is_up)

    def holds(self, seat: TargetSeat) -> bool:
        """Whether the next batch of `seat` waits for its residents."""
        return seat in self._due

    def receive(self, seat: TargetSeat, report: DraftReport, now: float, vocab_size: int) -> None:
        """Take in what the residents of `seat` have drafted after its last verdicts."""
        self._end_wait(seat)
        if math.isfinite(report.draft_time_s) and report.draft_time_s > 0.0:
            seat.drafted_s += report.draft_time_s
            seat.num_read += report.num_read
            weight = _TIME_WEIGHT if seat.draft_time_s else 1.0
            seat.draft_time_s += weight * (report.draft_time_s - seat.draft_time_s)
        for name, frame in report.frames:
            resident = seat.residents.get(name)
            if resident is not None:
                self._pool.receive(resident, frame, seat.sessions, now, vocab_size)
        if report.stalled:
            seat.note_stall()
        for name in report.stalled:
            if name in seat.residents:
                self._pool.replicas.count_fault(name, "stalled")

    def record_demand(self) -> None:
        """Export what residents were asked for since the last call."""
        for (drafter, task), num_nodes in self._num_asked.items():
            self._recorder.add(metrics.DRAFT_DEMAND, num_nodes, drafter=drafter, task=task)
        self._num_asked.clear()

    def _may_draft(self, resident: DrafterReplica, session: Session, now: float) -> bool:
        if now < session.declined.get(resident.name, now):
            return False
        if resident.name not in session.subscriptions:
            if not resident.breaker.allows(now):
                return False
            self._pool.attach(session, resident)
        return True

    def _end_wait(self, seat: TargetSeat) -> None:
        timer = self._due.pop(seat, None)
        if timer is not None:
            timer.cancel()

    def _count_hosts(self, seat: TargetSeat, step: int) -> None:
        for name in seat.residents:
            self._num_hosts[name] += step
            self._recorder.set(metrics.DRAFTER_UP, self._num_hosts[name], drafter=name)


class _NoLink:
    """What a resident has instead of a link: its frames come with its target's."""

    async def send(self, message: CommitFrame) -> None:
        raise WorkerError("a resident drafter is told by its target")

    def __aiter__(self) -> AsyncIterator[ProposalFrame]:
        return self

    async def __anext__(self) -> ProposalFrame:
        raise StopAsyncIteration

    async def close(self) -> None:
        return
