"""The recorder of one process: it holds the values of metrics and renders them; and what clients
are told, counted."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster import metrics
from cluster.metrics import Metric, vllm_metrics

EVERY_METRIC = (*metrics.ALL, *vllm_metrics.RECORDED)
_OF_TOKENS = {
    "prompt": metrics.PROMPT_TOKENS,
    "cached": vllm_metrics.CACHED_TOKENS,
    "output": metrics.OUTPUT_TOKENS,
}
# Whose metrics are whose.
INGRESS = (
    *_OF_TOKENS.values(),
    metrics.REJECTED,
    metrics.REQUESTS,
    metrics.KEY_TOKENS,
    metrics.TOKEN_RATE,
    vllm_metrics.REQUEST_PROMPT_TOKENS,
    vllm_metrics.REQUEST_GENERATION_TOKENS,
)
_OF_STEPS = (metrics.DEFICIT, metrics.SPEEDUP, metrics.PLAIN_STEPS, metrics.CACHE_MISSES)
COORDINATOR = tuple(metric for metric in EVERY_METRIC if metric not in (*INGRESS, *_OF_STEPS))
# Coordinators record the others too, of the pool's drafters.
TARGET = (
    *_OF_STEPS,
    metrics.BOOKKEEPING_FAULTS,
    metrics.CALIBRATION_ERROR,
    metrics.EXPECTED_ACCEPTED,
    metrics.ROLLOUT_PHASE,
    metrics.ROLLOUT_LEAD,
    metrics.ROLLOUT_CHANGES,
    metrics.DRAFT_TIME,
    metrics.DRAFT_DEMAND,
    metrics.DRAFTER_REQUESTS,
    metrics.DRAFTER_FAULTS,
    metrics.KV_PAGES_IN_USE,
    metrics.KV_PAGES_TOTAL,
)

# Names the process that a sample is of, beside the metric's own labels.
PROCESS_LABEL = "process"


class Recorder(Collector):
    """Holds one process's values.  Cheap enough for the per-round path (microseconds a call)."""

    def __init__(
        self, process: str = "", only: Sequence[Metric] = EVERY_METRIC, *, model_name: str = ""
    ) -> None:
        """process: a name that no other process has or had, written on every sample; "" for a
        process that is alone.  only: the metrics that it records.  model_name: on those of
        vLLM's."""
        self.process = process
        self.registry = CollectorRegistry()
        self._own_labels = {PROCESS_LABEL: process} if process else {}
        self._vllm_labels = {"model_name": model_name, "engine": process or "0"}
        self._series = {metric.name: metric.series(self.registry) for metric in only}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        self._child(metric, labels).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._child(metric, labels).set(value)

    def tell(self, metric: Metric, ask: Callable[[], float], **labels: str) -> None:
        """Let a gauge be asked for its value whenever somebody reads it."""
        self._child(metric, labels).set_function(ask)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        self._child(metric, labels).observe(value)

    def clear(self, metric: Metric) -> None:
        """Drop all labelled children of a metric that is told anew at every scrape."""
        self._series[metric.name].clear()

    def _child(self, metric: Metric, labels: dict[str, str]) -> Any:
        series = self._series[metric.name]
        return series.labels(**labels) if labels else series

    def collect(self) -> Iterator[Family]:
        """Yield what there is to read: all that is recorded, and what vLLM's names make of it.

        Without the times of creation, which would double the series of every counter.
        """
        recorded = {family.name: family for family in self.registry.collect()}
        for family in (*recorded.values(), *vllm_metrics.imitate(recorded)):
            is_vllms = family.name.startswith(vllm_metrics.PREFIX)
            own = self._vllm_labels if is_vllms else self._own_labels
            family.samples = [
                each._replace(labels=each.labels | own)
                for each in family.samples
                if not each.name.endswith("_created")
            ]
            yield family

    def render(self) -> bytes:
        """The values in Prometheus' text format."""
        return generate_latest(self)


def side_by_side(texts: Iterable[bytes]) -> bytes:
    """Merge several texts in Prometheus' format into one that describes each family once."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for block in f"\n{text.decode()}".rstrip("\n").split("\n# HELP ")[1:]:
            described, kind, *samples = block.split("\n")
            name = described.split(" ")[0]
            families.setdefault(name, [f"# HELP {described}", kind]).extend(samples)
    return "\n".join([*itertools.chain(*families.values()), ""]).encode()


def readable(page: bytes) -> bytes:
    """Return a page that a target wrote; raises ValueError where it has other metrics than a
    target's, or cannot be read."""
    families = {family.name for family in text_string_to_metric_families(page.decode())}
    if unknown := families - {metric.name for metric in TARGET}:
        raise ValueError(f"a page with metrics that are not its own: {sorted(unknown)[:3]}")
    return page


# Counts what clients are told, as `usage` says it, for /metrics, /stats and the keys' accounts.
#
# The ingress counts it, for it alone knows where texts end, and which of them are one request's.

# Of the texts of a request, the reason that counts for it: the first that there is.
_REASONS = ("error", "cancelled", "length", "stop")
_RATE_WINDOW_S = 10.0  # as metrics.TOKEN_RATE says
# By kind: prompt, cached (of those of prompt, the ones in the prefix cache), output.
Tokens = Counter[str]


class Told:
    """The counts of one process."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.monotonic) -> None:
        self.recorder = recorder
        self._clock = clock
        self._window, self._now, self._last = 0, Tokens(), Tokens()
        for kind in ("prompt", "output"):
            recorder.tell(metrics.TOKEN_RATE, partial(self._rate, kind), kind=kind)

    def count(self, tokens: Tokens, labels: Mapping[str, str]) -> None:
        """Clients have been told these."""
        self._turn()
        self._now += tokens
        for kind, amount in tokens.items():
            metric = _OF_TOKENS[kind]
            self.recorder.add(metric, amount, **{name: labels[name] for name in metric.labels})

    def _rate(self, kind: str) -> float:
        self._turn()
        return self._last[kind] / _RATE_WINDOW_S

    def _turn(self) -> None:
        window = int(self._clock() / _RATE_WINDOW_S)
        if window != self._window:
            self._last = self._now if window == self._window + 1 else Tokens()
            self._window, self._now = window, Tokens()


class ToldRequest:
    """The counts of one request."""

    def __init__(self, told: Told, task: str, segment: str) -> None:
        self._told = told
        self._labels = {"task": task, "segment": segment}
        self.tokens = Tokens()

    def grow(self, tokens: Tokens) -> None:
        """Its client has been told so much so far."""
        self._told.count(tokens - self.tokens, self._labels)
        self.tokens = tokens

    def end(self, reasons: Iterable[str], error_code: str = "") -> None:
        """It is over.  reasons: of its texts, as `cluster.core.FinishReason` has them.
        error_code: of the error that ended it."""
        recorder, tokens = self._told.recorder, self.tokens
        if error_code and not tokens:
            recorder.add(metrics.REJECTED, code=error_code)
            return
        reason = min(reasons, key=_REASONS.index)
        recorder.add(metrics.REQUESTS, 1, finish_reason=reason, **self._labels)
        if tokens:
            recorder.observe(vllm_metrics.REQUEST_PROMPT_TOKENS, tokens["prompt"])
            recorder.observe(vllm_metrics.REQUEST_GENERATION_TOKENS, tokens["output"])
