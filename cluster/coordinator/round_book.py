"""When the rounds of a target began and ended, and what is learned from that."""

from __future__ import annotations

from collections.abc import Callable

from cluster.config import CoordinatorConfig
from cluster.coordinator.batching import purity
from cluster.coordinator.controller import Controller
from cluster.coordinator.in_flight import Round
from cluster.coordinator.round_log import RoundLog
from cluster.coordinator.session import Session
from cluster.coordinator.statistics import RoundTimes
from cluster.coordinator.targets import OpenRound, TargetSeat
from cluster.coordinator.waits import DraftWaits
from cluster.messages import StepReport
from cluster.spec import evidence
from cluster.spec.budget import NO_DRAFTS


class RoundBook:
    """Opens and closes the rounds of targets and times them."""

    def __init__(
        self,
        controller: Controller,
        ledger: RoundLog,
        waits: DraftWaits,
        settings: CoordinatorConfig,
        clock: Callable[[], float],
    ) -> None:
        self._controller = controller
        self._ledger = ledger
        self._waits = waits
        self._settings = settings
        self._clock = clock

    def open(
        self, seat: TargetSeat, batch: list[Session], num_nodes: int, *, is_sampled: bool
    ) -> OpenRound:
        """`batch` is handed over now, with so many draft nodes.  is_sampled: its law."""
        names = {session.id for session in batch}
        opened = OpenRound(
            sent_at=self._clock(),
            num_sequences=len(batch),
            num_nodes=num_nodes,
            pending=names,
            stepping=set(names),
            is_clean=not seat.prefilling,
            is_queued=bool(seat.rounds),
            is_sampled=is_sampled,
            asked=seat.asked,
        )
        seat.rounds.append(opened)
        return opened

    def note_opened(self, seat: TargetSeat, opened: OpenRound, batch: list[Session]) -> None:
        """How long the batch has waited, and what became of the round before it."""
        now, last = opened.sent_at, seat.closed
        seat.closed = None
        waited_s = opened.waited_s = self._waits.end(seat, now)
        opened.drafted_s, seat.drafted_s = seat.drafted_s, 0.0
        if last is not None and last.report is not None and last.is_clean and not last.is_queued:
            times = RoundTimes(
                sent_at=last.sent_at,
                received_at=last.received_at,
                next_sent_at=now,
                num_sequences=last.num_sequences,
                num_nodes=last.num_nodes,
                step_time_s=last.report.step_time_s,
                forward_time_s=last.report.forward_time_s,
                queue_time_s=last.report.queue_time_s,
                waited_s=waited_s,
                drafted_s=opened.drafted_s,
            )
            self._ledger.note_round(times)
        if waited_s > 0.0:
            seat.waited_in_round = seat.num_rounds
        if last is not None and last.report is not None:  # else there was no verdict to plan after
            opened.planned_s = max(now - last.received_at - waited_s, 0.0)
            if not opened.asked.num_nodes:
                weight = evidence.RECENT if seat.planned_s else 1.0
                seat.planned_s += weight * (opened.planned_s - seat.planned_s)
            elif seat.planned_s:
                # Their way to here, and the reading of them, are a part of what drafts take.
                opened.drafted_s = max(opened.drafted_s, opened.planned_s - seat.planned_s)
        opened.num_read, seat.num_read = seat.num_read, 0
        if seat.has_stalled:
            opened.leave_out_stall(seat.planned_s)
            seat.has_stalled = False
        self._ledger.note_batch(len(batch), purity(batch))

    def close(self, seat: TargetSeat, opened: OpenRound, report: StepReport, now: float) -> None:
        """Note the step's times: this frame completed the batch."""
        opened.received_at = now
        opened.report = report
        step_time_s = self._measured(seat, opened, report, now)
        seat.closed, seat.received_at = opened, now
        seat.num_rounds += 1
        if opened.answers:
            sessions, num_tokens = zip(*opened.answers, strict=True)
            done = Round(
                sessions,
                num_tokens,
                num_nodes=opened.num_nodes,
                is_sampled=opened.is_sampled,
                step_time_s=step_time_s,
                # What reading prompts takes, too, says nothing of drafting.
                asked=opened.asked if opened.is_clean else NO_DRAFTS,
                draft_time_s=opened.drafted_s,
                num_read=opened.num_read,
                waited_s=opened.waited_s,
            )
            self._controller.learn(seat.id, done, now)

    def _measured(
        self, seat: TargetSeat, opened: OpenRound, report: StepReport, now: float
    ) -> float | None:
        """What the round took without drafting and waiting; None where that is not known."""
        if report.num_prefill_tokens:
            opened.is_clean = False
            return None
        # A batch that took several steps says nothing about the time of one.
        if report.num_sequences != opened.num_sequences:
            return None
        # Beside prefills the batch may have waited for one of their steps: the way is the usual.
        way_s: float | None = None
        if opened.is_clean:
            # This round's own: with drafts, frames and what is done with them take longer.
            way_s = max(now - opened.sent_at - report.queue_time_s - report.step_time_s, 0.0)
            # The target drafts by turns with its steps: no other batch could run meanwhile.
            planned_s = max(opened.planned_s - opened.drafted_s, 0.0)
            self._choose_cohorts(seat, opened, planned_s + way_s)
        round_time_s = seat.record_step_time(report.step_time_s, opened.planned_s, way_s)
        round_time_s = max(round_time_s - opened.drafted_s, report.step_time_s)
        if opened.is_queued:
            # What was done for it beside another batch's step cost no time of the target's.
            since = max(opened.sent_at, seat.received_at)
            return now - since if opened.is_clean else report.step_time_s
        return round_time_s

    def _choose_cohorts(self, seat: TargetSeat, opened: OpenRound, outside_s: float) -> None:
        """Learn from a round whether two batches by turns would be faster than one."""
        if self._settings.cohorts != "auto":
            return
        assert opened.report is not None
        step_time_s = opened.report.step_time_s
        # On its own cores the coordinator's work takes from the step whenever it is done.
        seat.cohorts.record(
            opened.num_sequences,
            opened.num_nodes,
            step_time_s,
            0.0 if seat.is_on_cpu else outside_s,
        )
        seat.num_cohorts = seat.cohorts.num_cohorts
