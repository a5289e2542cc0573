"""Keeps the calls to a recorder so that they can be sent to the process that exports metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from cluster import metrics
from cluster.messages import Sample
from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder


class Samples(Protocol):
    """Takes counts and gauges: a `Recorder`, or a `Tally` if the recorder is in another process."""

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None: ...
    def set(self, metric: Metric, value: float, **labels: str) -> None: ...


class Tally:
    """Keeps counts and gauges until they are taken."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], float] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        key = _key(metric, labels)
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._gauges[_key(metric, labels)] = value

    def take(self) -> tuple[Sample, ...]:
        """Return the changes since the last call."""
        counts, self._counts = self._counts, {}
        changed = {
            key: value for key, value in self._gauges.items() if self._told.get(key) != value
        }
        self._told.update(changed)
        return (
            *(Sample(name, "add", labels, value) for (name, labels), value in counts.items()),
            *(Sample(name, "set", labels, value) for (name, labels), value in changed.items()),
        )

    def tell_all(self) -> None:
        """Include every gauge in the next `take`, because the receiver has changed."""
        self._told.clear()


Gauge = tuple[Metric, tuple[str, ...]]


def enter(samples: Iterable[Sample], recorder: Recorder) -> set[Gauge]:
    """Replay the kept calls on `recorder`; samples of metrics that this release lacks are ignored.

    Returns the gauges that were set.
    """
    gauges: set[Gauge] = set()
    for sample in samples:
        metric = _BY_NAME.get(sample.metric)
        if metric is None or len(metric.labels) != len(sample.labels):
            continue
        if not math.isfinite(sample.value) or _KINDS.get(sample.how) != metric.kind:
            continue
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        if sample.how == "set":
            recorder.set(metric, sample.value, **labels)
            gauges.add((metric, sample.labels))
        elif sample.value >= 0.0:
            recorder.add(metric, sample.value, **labels)
    return gauges


def _key(metric: Metric, labels: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    return metric.name, tuple(labels[name] for name in metric.labels)


_BY_NAME = {metric.name: metric for metric in metrics.ALL}
_KINDS = {"add": "counter", "set": "gauge"}
