"""The recorder of one process: it holds the values of metrics and renders them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from cluster import metrics
from cluster.metrics import Metric, vllm_metrics

EVERY_METRIC = (*metrics.ALL, *vllm_metrics.RECORDED)

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
        self._series: dict[str, Counter | Gauge | Histogram] = {}
        for metric in only:
            made: Any = {
                "counter": Counter,
                "gauge": Gauge,
                "histogram": partial(Histogram, buckets=metric.buckets),
            }[metric.kind]
            self._series[metric.name] = made(
                metric.name, metric.help, metric.labels, registry=self.registry
            )

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
        recorded = {}
        for family in self.registry.collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            recorded[family.name] = family
        for family in (*recorded.values(), *vllm_metrics.imitate(recorded)):
            is_vllms = family.name.startswith(vllm_metrics.PREFIX)
            own = self._vllm_labels if is_vllms else self._own_labels
            family.samples = [each._replace(labels=each.labels | own) for each in family.samples]
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
            name, _, _ = described.partition(" ")
            families.setdefault(name, [f"# HELP {described}", kind]).extend(samples)
    lines = itertools.chain.from_iterable(families.values())
    return ("\n".join(lines) + "\n").encode()


def readable(page: bytes, only: Sequence[Metric]) -> bytes:
    """Return a page that another process wrote; raises ValueError where it has other metrics than
    these, or cannot be read."""
    families = {family.name for family in text_string_to_metric_families(page.decode())}
    if unknown := families - {metric.name for metric in only}:
        raise ValueError(f"a page with metrics that are not its own: {sorted(unknown)[:3]}")
    return page
