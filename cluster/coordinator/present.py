"""What a coordinator has at present, where all its parts look; what happens there, and the series
of it.

Those who count what happens are told once the tokens are gone.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster import metrics
from cluster.config.schema import Config
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import Clock, FinishReason, Request
from cluster.messages import AdapterList, StepReport, TextVerdict, WorkerDescription
from cluster.metrics import Metric, vllm_metrics
from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence
from cluster.records import record
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel, Group

E = TypeVar("E")
NO_TARGET = WorkerDescription("", "target", "")


@record
class Asked:
    """A drafter of the pool is told of a text and asked for so many nodes.

    is_hit: what it sent before went on behind the last verdict; None = there was none yet.
    """

    drafter: str
    group: Group
    task: str
    num_nodes: int
    is_hit: bool | None


@record
class Answered:
    """A verdict was committed.  former_at: when the one before it was, None = these are the first
    tokens."""

    session: Session
    verdict: TextVerdict
    at: float
    former_at: float | None


@record
class Ended:
    """A session is over.  target_id: where it was; "" = nowhere."""

    session: Session
    reason: FinishReason
    at: float
    target_id: str


@record
class Stepped:
    """A target has made a step."""

    target_id: str
    report: StepReport


@dataclass(slots=True)
class Present:
    """config: the last one that it was told.  sessions: those with a place and those that wait for
    one.  served: what every target can; adapters: that all have, None = none has told its own yet;
    without targets, what it was with the last ones.  ingresses: are called with every change of the
    adapters.  refused: why drafters take no part, by name, and why a change of the configuration
    was refused, by what it was of; "" = it was not."""

    config: Config
    recorder: Recorder
    clock: Clock
    sessions: dict[str, Session] = field(default_factory=dict)
    seats: dict[str, TargetSeat] = field(default_factory=dict)
    served: WorkerDescription = NO_TARGET
    adapters: AdapterList | None = None
    ingresses: set[Callable[[], None]] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    _listeners: list[tuple[type[Any], Fence, Callable[[Any], None]]] = field(default_factory=list)
    _happened: defaultdict[type[Any], list[Any]] = field(default_factory=lambda: defaultdict(list))

    def listen(self, kind: type[E], part: str, hear: Callable[[Sequence[E]], None]) -> None:
        """Let `hear` be told of all events of a kind; if it fails, that hurts nobody else.

        part: its name in the metric of failures."""
        self._listeners.append((kind, Fence(self.recorder, part), hear))

    def post(self, event: object) -> None:
        """Keep what happens for its listeners."""
        self._happened[type(event)].append(event)

    def settle(self) -> None:
        """Tell of everything since the last call."""
        happened, self._happened = self._happened, defaultdict(list)
        for kind, section, hear in self._listeners:
            if kind in happened:
                with section:
                    hear(happened[kind])


# What the metrics are told of steps and texts, and of how much drafters are asked for.


_MAX_RECENT_STEPS = 512
_STEP_FIELDS = (
    "num_sequences",
    "num_nodes",
    "step_time_s",
    "forward_time_s",
    "period_s",
    "draft_time_s",
)


class Series:
    """Enters what happens into a recorder.  recent_steps: the last ones, oldest first, for status
    reports and benchmarks."""

    def __init__(self, present: Present) -> None:
        self._recorder = present.recorder
        self._mean_purity: float | None = None
        self.recent_steps: deque[dict[str, float]] = deque(maxlen=_MAX_RECENT_STEPS)
        self._num_commits: Counter[tuple[str, Group]] = Counter()  # by drafter and group
        self._since = 0.0
        present.listen(Asked, "metrics", self._enter_asked)
        present.listen(Answered, "metrics", self._enter_answers)
        present.listen(Ended, "metrics", self._enter_ends)
        present.listen(Stepped, "metrics", self._enter_steps)

    def _enter_answers(self, answers: Sequence[Answered]) -> None:
        tasks = []
        for each in answers:
            session, verdict = each.session, each.verdict
            if session.is_scored:
                continue
            request, num_kept = session.request, len(verdict.token_ids)
            tasks.append(request.task)
            if each.former_at is None:
                ttft_s = each.at - session.arrived_at
                self._observe(metrics.TTFT, metrics.SEGMENT_TTFT, ttft_s, request)
            elif num_kept:
                interval_s = (each.at - each.former_at) / num_kept
                self._observe(metrics.ITL, metrics.SEGMENT_ITL, interval_s, request)
            if verdict.num_nodes:
                self.credit(request, session.text.names, verdict)
        if tasks:
            purity = max(tasks.count(task) for task in set(tasks)) / len(tasks)
            mean = purity if self._mean_purity is None else self._mean_purity
            self._mean_purity = mean + evidence.RECENT * (purity - mean)
            self._recorder.set(metrics.BATCH_PURITY, self._mean_purity)

    def _observe(self, metric: Metric, of_segment: Metric, value: float, request: Request) -> None:
        self._recorder.observe(metric, value, task=request.task)
        if request.segment:
            self._recorder.observe(of_segment, value, segment=request.segment)

    def credit(self, request: Request, names: Sequence[str], verdict: TextVerdict) -> None:
        """Count a verified tree of a text whose drafters have these names.

        A node of several drafters counts for one of them (`Text.owners`), so that the
        counts of all drafters add up to the totals; for the others it is a shared one.  The
        position of an accepted node in the metrics is its depth, from 0.
        """
        add, task, bits = self._recorder.add, request.task, verdict.sources.tolist()
        add(metrics.SPEC_STEPS, task=task)
        if request.segment:
            add(metrics.SEGMENT_DRAFT_TOKENS, verdict.num_nodes, segment=request.segment)
            add(metrics.SEGMENT_ACCEPTED_TOKENS, len(bits), segment=request.segment)
        columns = zip(names, verdict.verified, verdict.credited, strict=False)
        for place, (name, num_proposed, num_own) in enumerate(columns):
            if not num_proposed:
                continue
            depths = [depth for depth, owner in enumerate(verdict.owners) if owner == place]
            for metric, count in (
                (metrics.NUM_DRAFTS, 1),
                (metrics.NUM_DRAFT_TOKENS, num_own),
                (metrics.NUM_ACCEPTED_TOKENS, len(depths)),
                (metrics.NUM_SHARED_TOKENS, sum(each >> place & 1 for each in bits) - len(depths)),
            ):
                add(metric, count, drafter=name, task=task)
            for depth in depths:
                add(metrics.NUM_ACCEPTED_PER_POS, drafter=name, position=str(depth))

    def _enter_ends(self, ends: Sequence[Ended]) -> None:
        for each in ends:
            session = each.session
            if session.last_at is None or session.is_scored:
                continue
            prefill_s, decode_s = session.prefill_time_s, session.decode_time_s
            num_more = session.num_output_tokens - 1
            for metric, value in (
                (vllm_metrics.E2E_TIME, each.at - session.arrived_at),
                (vllm_metrics.QUEUE_TIME, session.queue_time_s),
                (vllm_metrics.PREFILL_TIME, prefill_s),
                (vllm_metrics.DECODE_TIME, decode_s),
                (vllm_metrics.INFERENCE_TIME, prefill_s + decode_s),
                (vllm_metrics.TIME_PER_OUTPUT_TOKEN, decode_s / num_more if num_more > 0 else 0.0),
            ):
                self._recorder.observe(metric, value)

    def _enter_steps(self, steps: Sequence[Stepped]) -> None:
        recorder = self._recorder
        for each in steps:
            report, target = each.report, each.target_id
            num_tokens = report.num_prompt_tokens + report.num_emitted_tokens
            recorder.add(metrics.STEPS, target=target)
            recorder.observe(metrics.STEP_TIME, report.step_time_s, target=target)
            recorder.observe(metrics.FORWARD_TIME, report.forward_time_s, target=target)
            recorder.observe(vllm_metrics.STEP_TOKENS, num_tokens)
            recorder.add(vllm_metrics.PREEMPTIONS, report.num_preempted)
            if report.num_sequences:
                recorder.observe(metrics.BATCH_SIZE, report.num_sequences)
            reads = report.num_prompt_tokens or report.num_prefill_tokens
            if report.period_s and report.num_sequences and not reads:
                self.recent_steps.append({name: getattr(report, name) for name in _STEP_FIELDS})
                outside_s = report.period_s - report.forward_time_s - report.draft_time_s
                recorder.observe(metrics.ROUND_OVERHEAD, max(outside_s, 0.0))

    def _enter_asked(self, asked: Sequence[Asked]) -> None:
        add = self._recorder.add
        for each in asked:
            labels = {"drafter": each.drafter, "task": each.task}
            self._num_commits[each.drafter, each.group] += 1
            add(metrics.DRAFTER_COMMITS, 1, **labels)
            add(metrics.DRAFT_DEMAND, each.num_nodes, **labels)
            if each.num_nodes and each.is_hit is not None:
                add(metrics.PRE_DRAFTED, 1, outcome="hit" if each.is_hit else "miss", **labels)

    def worth(self, now: float, acceptance: AcceptanceModel) -> defaultdict[str, float]:
        """Return the tokens per second that the trees of each drafter were good for, since the
        last call.

        They are those of its best few nodes, verified or not: a drafter that has too much to do to
        be in time is worth as much as one that has not.
        """
        elapsed_s, self._since = now - self._since, now
        per_s: defaultdict[str, float] = defaultdict(float)
        for (drafter, group), count in self._num_commits.items():
            tokens = count * acceptance.known(drafter, group).accepted_of_few()
            per_s[drafter] += tokens / elapsed_s if elapsed_s > 0.0 else 0.0
        self._num_commits.clear()
        return per_s
