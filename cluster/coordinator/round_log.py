"""The log of the rounds: what happened is noted at once, and entered while the targets compute.

Nothing of this is needed for the next frame, so none of it is done before that has gone out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster import metrics
from cluster.coordinator.activity import ActivityLog
from cluster.coordinator.controller import Controller
from cluster.coordinator.engines import forget_engines
from cluster.coordinator.fence import Fence
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.session import Session, Status
from cluster.coordinator.statistics import Attribution, RecentRounds, RoundTimes
from cluster.coordinator.targets import TargetSeat
from cluster.core import TokenArray, Verdict
from cluster.messages import StepReport
from cluster.metrics import Recorder

# Weight of the newest batch in the exported mean purity.
_PURITY_WEIGHT = 0.02


@dataclass(slots=True, eq=False)
class _Answer:
    """A committed verdict.  last_event_at: None where these are the first tokens."""

    session: Session
    in_flight: InFlight
    path: TokenArray
    at: float
    last_event_at: float | None
    num_kept: int


class RoundLog:
    """Metrics, recent rounds, and what drafts turned out to be worth."""

    def __init__(
        self, recorder: Recorder, controller: Controller, fence: Fence, activity: ActivityLog
    ) -> None:
        self._recorder = recorder
        self._controller = controller
        self._activity = activity
        self._metrics = fence.section("metrics")
        self._scoring = fence.section("scores")
        self._answers: list[_Answer] = []
        self._reports: list[tuple[TargetSeat, StepReport]] = []
        self._rounds: list[RoundTimes] = []
        self._batches: list[tuple[int, float]] = []
        self._num_misses = 0
        self._mean_purity: float | None = None
        self.recent_rounds = RecentRounds()

    def note_verdict(
        self, session: Session, in_flight: InFlight, verdict: Verdict, now: float, num_kept: int
    ) -> None:
        """A verdict of which num_kept tokens were emitted; before its event is counted."""
        self._answers.append(
            _Answer(session, in_flight, verdict.path, now, session.last_event_at, num_kept)
        )

    def note_report(self, seat: TargetSeat, report: StepReport) -> None:
        self._reports.append((seat, report))

    def note_round(self, times: RoundTimes) -> None:
        self._rounds.append(times)

    def note_batch(self, size: int, purity: float) -> None:
        self._batches.append((size, purity))

    def note_miss(self) -> None:
        self._num_misses += 1

    def settle(self) -> None:
        """Enter everything noted so far."""
        answers, self._answers = self._answers, []
        reports, self._reports = self._reports, []
        rounds, self._rounds = self._rounds, []
        batches, self._batches = self._batches, []
        with self._metrics:
            self._enter_answers(answers)
        for seat, report in reports:
            with self._metrics:
                self._enter_report(seat, report)
        with self._metrics:
            for times in rounds:
                self.recent_rounds.add(times)
                self._recorder.observe(metrics.ROUND_OVERHEAD, times.outside_s)
            for size, purity in batches:
                self._enter_batch(size, purity)
        with self._scoring:
            running = [each.session for each in answers if each.session.status != Status.FINISHED]
            ended = [each.session for each in answers if each.session.status == Status.FINISHED]
            self._controller.score(running)
            self._controller.score(ended, ends=True)
        if self._num_misses:
            num_misses, self._num_misses = self._num_misses, 0
            self._recorder.add(metrics.CACHE_MISSES, num_misses)

    def record_scores(self) -> None:
        """Export what drafts are worth; not on the way of a round."""
        self._controller.record(self._recorder)

    def forget(self, seat: TargetSeat) -> None:
        """The target has left: what it last said of itself is not true any more."""
        self.settle()
        self._controller.forget(seat.id)
        self._activity.forget(seat.id)
        with self._metrics:
            forget_engines(self._recorder, seat.id, seat.description)
        if not seat.has_reported:
            return
        with self._metrics:
            for gauge in (metrics.KV_PAGES_IN_USE, metrics.KV_PAGES_TOTAL):
                self._recorder.forget(gauge, role="target", worker=seat.id)
            self._recorder.forget(metrics.DEFICIT, target=seat.id)

    def _enter_answers(self, answers: Sequence[_Answer]) -> None:
        """One entry per series, not per answer: a step answers a whole batch."""
        recorder = self._recorder
        num_tokens: dict[str, int] = {}
        attribution = Attribution()
        for answer in answers:
            task, num_kept = answer.session.request.task, answer.num_kept
            num_tokens[task] = num_tokens.get(task, 0) + num_kept
            # The tree of a session that is scored was no draft.
            num_drafted = len(answer.in_flight.tree) if answer.in_flight.drafters else 0
            num_accepted = len(answer.path) if num_drafted else 0
            self._activity.note_step(num_drafted, num_accepted, num_kept)
            if answer.last_event_at is None:
                self._activity.counts.num_prompt_tokens += answer.session.prompt_len
                ttft_s = answer.at - answer.session.arrived_at
                recorder.observe(metrics.TTFT, ttft_s, task=task)
            elif num_kept:
                interval_s = (answer.at - answer.last_event_at) / num_kept
                recorder.observe(metrics.ITL, interval_s, task=task)
            if answer.in_flight.drafters:
                attribution.add(task, answer.in_flight, answer.path)
        for task, count in num_tokens.items():
            recorder.add(metrics.OUTPUT_TOKENS, count, task=task)
        attribution.record(recorder)

    def _enter_report(self, seat: TargetSeat, report: StepReport) -> None:
        recorder = self._recorder
        if report.num_sequences or report.num_prefill_tokens:
            recorder.add(metrics.STEPS, target=seat.id)
            recorder.observe(metrics.STEP_TIME, report.step_time_s, target=seat.id)
            recorder.observe(metrics.FORWARD_TIME, report.forward_time_s, target=seat.id)
        seat.has_reported = True
        self._activity.note_report(seat.id, report)
        recorder.set(metrics.KV_PAGES_IN_USE, report.pages_in_use, role="target", worker=seat.id)
        recorder.set(metrics.KV_PAGES_TOTAL, report.pages_total, role="target", worker=seat.id)
        deficit_s, num_refusals = self._controller.take_account(seat.id)
        recorder.set(metrics.DEFICIT, deficit_s, target=seat.id)
        if num_refusals:
            recorder.add(metrics.GUARD_REFUSALS, num_refusals, target=seat.id)

    def _enter_batch(self, size: int, purity: float) -> None:
        self._recorder.observe(metrics.BATCH_SIZE, size)
        mean = purity if self._mean_purity is None else self._mean_purity
        self._mean_purity = mean + _PURITY_WEIGHT * (purity - mean)
        self._recorder.set(metrics.BATCH_PURITY, self._mean_purity)
