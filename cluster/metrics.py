"""Every metric, declared once, with its definition and unit; and the recorder that holds them.

Names follow vLLM's speculative-decoding counters, with the labels `drafter` and `task` added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]

# Rounds of small models take fractions of a millisecond, long prefills of large ones seconds.
_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0
)  # fmt: skip
_TOKENS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series family.  Counters are exported with `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


REQUESTS = Metric("drafthouse_requests", "counter", "Finished requests.", ("task", "finish_reason"))
REJECTED = Metric("drafthouse_rejected_requests", "counter", "Requests refused.", ("code",))
RUNNING = Metric("drafthouse_running_requests", "gauge", "Requests that are being decoded.")
QUEUED = Metric("drafthouse_queued_requests", "gauge", "Admitted requests that wait for a place.")
PROMPT_TOKENS = Metric("drafthouse_prompt_tokens", "counter", "Prompt tokens.", ("task",))
OUTPUT_TOKENS = Metric("drafthouse_output_tokens", "counter", "Emitted tokens.", ("task",))
TTFT = Metric(
    "drafthouse_time_to_first_token_seconds", "histogram", "Arrival to first token.", ("task",)
)
ITL = Metric(
    "drafthouse_inter_token_latency_seconds",
    "histogram",
    "Time between two events of a stream, divided by the tokens of the later one.",
    ("task",),
)
STEPS = Metric("drafthouse_target_steps", "counter", "Target steps.", ("target",))
STEP_TIME = Metric(
    "drafthouse_target_step_seconds", "histogram", "Forward, draw and walk.", ("target",)
)
FORWARD_TIME = Metric(
    "drafthouse_target_forward_seconds", "histogram", "The model's forward pass.", ("target",)
)
ROUND_OVERHEAD = Metric(
    "drafthouse_round_overhead_seconds",
    "histogram",
    "One decode round, from a verify frame to the next, less the target's forward: wire, codec, "
    "draw, queues and coordinator.",
)
BATCH_SIZE = Metric(
    "drafthouse_batch_size", "histogram", "Sequences per decode step.", (), (*_TOKENS, 32.0, 64.0)
)
BATCH_PURITY = Metric(
    "drafthouse_batch_purity", "gauge", "Share of a batch's most frequent task class, mean."
)
DEFICIT = Metric(
    "drafthouse_speculation_deficit_seconds",
    "gauge",
    "What speculation has lost against plain decoding and not regained.",
    ("target",),
)
GUARD_REFUSALS = Metric(
    "drafthouse_guard_refusals",
    "counter",
    "Steps for which the deficit guard refused the number of drafts that promised most.",
    ("target",),
)
BOOKKEEPING_FAULTS = Metric(
    "drafthouse_bookkeeping_faults",
    "counter",
    "Failures of what only learns from rounds (statistics, calibration, accounts, planning); the "
    "rounds went on without it.  Each one is a defect.",
    ("part",),
)
DRAFT_WAITS = Metric(
    "drafthouse_draft_waits",
    "counter",
    "Steps that waited for drafts; arrived: they, or word that none will come, before the time was "
    "up, late: not, moot: what they waited for was cancelled. Success ratio = arrived / all.",
    ("outcome",),
)
DRAFT_WAITED = Metric(
    "drafthouse_draft_waited_seconds", "counter", "Time that steps waited for drafts."
)
NUM_DRAFTS = Metric(
    "spec_decode_num_drafts",
    "counter",
    "Sequence steps that verified at least one node of the drafter.",
    ("drafter", "task"),
)
NUM_DRAFT_TOKENS = Metric(
    "spec_decode_num_draft_tokens", "counter", "Draft tokens verified.", ("drafter", "task")
)
NUM_ACCEPTED_TOKENS = Metric(
    "spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted.", ("drafter", "task")
)
NUM_ACCEPTED_PER_POS = Metric(
    "spec_decode_num_accepted_tokens_per_pos",
    "counter",
    "Draft tokens accepted, by depth in the tree.",
    ("drafter", "task", "position"),
)
CALIBRATION_ERROR = Metric(
    "drafthouse_survival_calibration_error",
    "gauge",
    "Expected calibration error of the drafter's survivals as the budget used them: mean "
    "|predicted - accepted| over ten bins, of the last few thousand nodes. law: greedy or sampled.",
    ("drafter", "task", "law"),
)
DRAFTER_UP = Metric("drafthouse_drafter_up", "gauge", "Live replicas.", ("drafter",))
DRAFTER_FAULTS = Metric(
    "drafthouse_drafter_faults", "counter", "Broken links and refused frames.", ("drafter", "why")
)
DRAFTER_REQUESTS = Metric(
    "drafthouse_drafter_requests", "gauge", "Requests with drafter state.", ("drafter", "worker")
)
DRAFTER_COMMITS = Metric(
    "drafthouse_drafter_commits",
    "counter",
    "Commits by what they asked of the drafter; growing: drafts, probing: a few after a pause, "
    "parked: none, for none were used lately. Share of the time it is parked = parked / all.",
    ("drafter", "task", "demand"),
)
DRAFT_TIME = Metric(
    "drafthouse_draft_seconds",
    "counter",
    "Time that the drafter's replicas computed. Mean time per tree = this / commits that are not "
    "parked.",
    ("drafter",),
)
PRE_DRAFTED = Metric(
    "drafthouse_pre_drafted_steps",
    "counter",
    "Commits that asked for drafts, by whether the drafter's former tree went on behind them; hit: "
    "it did, so the next step had drafts at once, miss: it did not. Counted while waits for drafts "
    "are priced. Hit rate = hit / all.",
    ("drafter", "task", "outcome"),
)
DRAFT_DEMAND = Metric(
    "drafthouse_draft_demand_nodes",
    "counter",
    "Nodes that commits asked for. Mean demand = this / commits that are not parked.",
    ("drafter", "task"),
)
KV_PAGES_IN_USE = Metric(
    "drafthouse_kv_pages_in_use",
    "gauge",
    "KV pages held by requests (prefix-cache pages nobody holds are free).",
    ("role", "worker"),
)
KV_PAGES_TOTAL = Metric("drafthouse_kv_pages", "gauge", "KV pages.", ("role", "worker"))
TARGET_UP = Metric("drafthouse_target_up", "gauge", "Live target replicas.")
FAILOVERS = Metric("drafthouse_failovers", "counter", "Sequences moved to another worker.")
CACHE_MISSES = Metric(
    "drafthouse_target_cache_misses", "counter", "Items answered with `I have m tokens`."
)

MISSING_PROCESSES = Metric(
    "drafthouse_missing_processes",
    "gauge",
    "Processes that did not answer this scrape in time, and whose series are absent from it.",
    ("role",),
)

ALL: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))


# What an ingress records of its own; everything else is the coordinators'.
INGRESS: tuple[Metric, ...] = (REJECTED,)

# Names the process that a sample is of, beside the metric's own labels.
PROCESS_LABEL = "process"


class Recorder:
    """Holds one process's values.  Cheap enough for the per-round path (microseconds a call)."""

    def __init__(self, process: str = "", only: Sequence[Metric] = ALL) -> None:
        """process: a name that no other process has or had, written on every sample that is
        rendered; "" for a process that is alone.  only: what it records."""
        self.process = process
        self.registry = CollectorRegistry()
        self._rendered = CollectorRegistry()
        self._rendered.register(_Labelled(self.registry, process))
        kinds = {"counter": Counter, "gauge": Gauge}
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        # prometheus_client takes longer to find a child than to change it.
        self._children: dict[tuple[str | None, ...], Any] = {}
        for metric in only:
            if metric.kind == "histogram":
                self._series[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, buckets=metric.buckets,
                    registry=self.registry,
                )  # fmt: skip
            else:
                self._series[metric.name] = kinds[metric.kind](
                    metric.name, metric.help, metric.labels, registry=self.registry
                )

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        self._child(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._child(metric, labels).set(value)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        self._child(metric, labels).observe(value)

    def forget(self, metric: Metric, **labels: str) -> None:
        """Drop one labelled child, when what it describes is gone."""
        values = tuple(labels[name] for name in metric.labels)
        self._children.pop((metric.name, *values), None)
        self._series[metric.name].remove(*values)

    def _child(self, metric: Metric, labels: dict[str, str]) -> Any:
        if not labels:
            return self._series[metric.name]
        key = (metric.name, *(labels.get(name) for name in metric.labels))
        child = self._children.get(key) if len(labels) == len(metric.labels) else None
        if child is None:  # or labelled wrongly, which raises
            child = self._children[key] = self._series[metric.name].labels(**labels)
        return child

    def render(self) -> bytes:
        """The values in Prometheus' text format."""
        return generate_latest(self._rendered)


class _Labelled(Collector):
    """The families of a registry with the process on every sample."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        self._registry = registry
        self._labels = {PROCESS_LABEL: process} if process else {}

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            labelled = Family(family.name, family.documentation, family.type, family.unit)
            labelled.samples = [
                sample._replace(labels=sample.labels | self._labels) for sample in family.samples
            ]
            yield labelled
