"""The log of the steps: what happened is noted at once, and entered once the tokens are gone."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster import metrics
from cluster.coordinator.activity import ActivityLog
from cluster.coordinator.engines import forget_engines, record_engines
from cluster.coordinator.pool_scores import PoolScores
from cluster.coordinator.session import Session, Status
from cluster.coordinator.statistics import Attribution
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.watch import Watches
from cluster.core import Request
from cluster.messages import StepReport, TextVerdict
from cluster.metrics import Metric, vllm_metrics
from cluster.metrics.recorder import Recorder
from cluster.models.engine_state import EngineState
from cluster.plan.fence import Fence

# Weight of the newest batch in the exported mean purity.
_PURITY_WEIGHT = 0.02
_MAX_RECENT_STEPS = 512
_STEP_FIELDS = (
    "num_sequences", "num_nodes", "step_time_s", "forward_time_s", "period_s", "draft_time_s",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class _Answer:
    """A committed verdict.  last_event_at: None where these are the first tokens."""

    session: Session
    verdict: TextVerdict
    at: float
    last_event_at: float | None


class StepLog:
    """Metrics, recent steps, and what the pool's drafts turned out to be worth."""

    def __init__(
        self,
        recorder: Recorder,
        scores: PoolScores,
        fence: Fence,
        activity: ActivityLog,
        watches: Watches,
    ) -> None:
        self._recorder = recorder
        self._scores = scores
        self._activity = activity
        self._watches = watches
        self._metrics = fence.section("metrics")
        self._scoring = fence.section("scores")
        self._answers: list[_Answer] = []
        self._reports: list[tuple[TargetSeat, StepReport]] = []
        self._mean_purity: float | None = None
        # Of the last steps, oldest first, for status reports and benchmarks.
        self.recent_steps: deque[dict[str, float]] = deque(maxlen=_MAX_RECENT_STEPS)

    def note_verdict(self, session: Session, verdict: TextVerdict, now: float) -> None:
        """A verdict was committed; before its event is counted."""
        if session.is_scored:  # its tokens are a prompt's
            self._activity.counts.num_prompt_tokens += len(verdict.token_ids)
            return
        self._answers.append(_Answer(session, verdict, now, session.last_event_at))

    def note_report(self, seat: TargetSeat, report: StepReport) -> None:
        """A target tells of a step.  A report with impossible times is left out."""
        times_s = (report.step_time_s, report.forward_time_s, report.period_s, report.draft_time_s)
        if all(math.isfinite(time_s) and time_s >= 0.0 for time_s in times_s):
            self._reports.append((seat, report))

    def settle(self) -> None:
        """Enter everything noted so far."""
        answers, self._answers = self._answers, []
        reports, self._reports = self._reports, []
        with self._metrics:
            self._enter_answers(answers)
        for seat, report in reports:
            with self._metrics:
                self._enter_report(seat, report)
        with self._scoring:
            running = [each.session for each in answers if each.session.status != Status.FINISHED]
            ended = [each.session for each in answers if each.session.status == Status.FINISHED]
            self._scores.score(running)
            self._scores.score(ended, ends=True)

    def record_scores(self) -> None:
        """Export what drafts are worth; not on the way of a token."""
        self._scores.record(self._recorder)

    def renew_engines(self, seat: TargetSeat, engines: tuple[EngineState, ...]) -> None:
        """A drafter inside the target was made anew: export what computes now."""
        with self._metrics:
            forget_engines(self._recorder, seat.id, seat.description)
            seat.description = replace(seat.description, engines=engines)
            record_engines(self._recorder, seat.id, seat.description)

    def forget(self, seat: TargetSeat) -> None:
        """The target has left: what it last said of itself is not true any more."""
        self.settle()
        with self._metrics:
            forget_engines(self._recorder, seat.id, seat.description)
        if not seat.has_reported:
            return
        with self._metrics:
            for gauge in (metrics.KV_PAGES_IN_USE, metrics.KV_PAGES_TOTAL):
                self._recorder.forget(gauge, role="target", worker=seat.id)

    def _enter_answers(self, answers: Sequence[_Answer]) -> None:
        """One entry per series, not per answer: a step answers a whole batch."""
        recorder = self._recorder
        attribution = Attribution()
        for answer in answers:
            session, verdict = answer.session, answer.verdict
            request, num_kept = session.request, len(verdict.token_ids)
            self._activity.note_step(verdict)
            if answer.last_event_at is None:
                self._activity.counts.num_prompt_tokens += session.prompt_len
                ttft_s = answer.at - session.arrived_at
                self._observe(metrics.TTFT, metrics.SEGMENT_TTFT, ttft_s, request)
            elif num_kept:
                interval_s = (answer.at - answer.last_event_at) / num_kept
                self._observe(metrics.ITL, metrics.SEGMENT_ITL, interval_s, request)
            if verdict.num_nodes:
                attribution.add(request.task, session.names, verdict, request.segment)
        attribution.record(recorder)
        if answers:
            self._enter_batch([answer.session.request.task for answer in answers])

    def _observe(self, metric: Metric, of_segment: Metric, value: float, request: Request) -> None:
        self._recorder.observe(metric, value, task=request.task)
        if request.segment:
            self._recorder.observe(of_segment, value, segment=request.segment)

    def _enter_report(self, seat: TargetSeat, report: StepReport) -> None:
        recorder = self._recorder
        num_tokens = report.num_prompt_tokens + report.num_emitted_tokens
        if report.num_sequences or num_tokens or report.num_prefill_tokens:
            for watch in self._watches.open:
                watch.stepped(seat.id, report)
            recorder.add(metrics.STEPS, target=seat.id)
            recorder.observe(metrics.STEP_TIME, report.step_time_s, target=seat.id)
            recorder.observe(metrics.FORWARD_TIME, report.forward_time_s, target=seat.id)
            recorder.observe(vllm_metrics.STEP_TOKENS, num_tokens)
            recorder.add(vllm_metrics.PREEMPTIONS, report.num_preempted)
        if report.num_sequences:
            recorder.observe(metrics.BATCH_SIZE, report.num_sequences)
        reads = report.num_prompt_tokens or report.num_prefill_tokens
        if report.period_s and report.num_sequences and not reads:
            self.recent_steps.append({name: getattr(report, name) for name in _STEP_FIELDS})
            outside_s = report.period_s - report.forward_time_s - report.draft_time_s
            recorder.observe(metrics.ROUND_OVERHEAD, max(outside_s, 0.0))
        seat.has_reported = True
        recorder.set(metrics.KV_PAGES_IN_USE, report.pages_in_use, role="target", worker=seat.id)
        recorder.set(metrics.KV_PAGES_TOTAL, report.pages_total, role="target", worker=seat.id)

    def _enter_batch(self, tasks: Sequence[str]) -> None:
        """tasks: of the texts that a step has answered."""
        purity = max(tasks.count(task) for task in set(tasks)) / len(tasks)
        mean = purity if self._mean_purity is None else self._mean_purity
        self._mean_purity = mean + _PURITY_WEIGHT * (purity - mean)
        self._recorder.set(metrics.BATCH_PURITY, self._mean_purity)
