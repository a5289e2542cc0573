"""Mirrors our metrics into Ray's metrics agent, so that the dashboard's Prometheus has them.

Ray exports them with the prefix `ray_` and a few seconds' delay; our own /metrics is live.  The
mirror runs on a timer of its own and costs no token anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from ray.util import metrics as ray_metrics

from cluster.metrics.recorder import Recorder

# The name and the labels of a sample.
Series = tuple[str, tuple[tuple[str, str], ...]]

_PERIOD_S = 2.0


class Exporter:
    """Copies the values of one `Recorder`; tags are the labels.

    Counters are passed on as increments.  A histogram becomes gauges with the names, labels and
    values of its `_bucket`, `_sum` and `_count`, because Ray's histograms take single observations
    only; `rate` and `histogram_quantile` ask for no more.
    """

    def __init__(self, recorder: Recorder, refresh: Callable[[], object] = lambda: None) -> None:
        """refresh: called on the event loop before each copy, to bring gauges up to date."""
        self._recorder = recorder
        self._refresh = refresh
        self._metrics: dict[str, Any] = {}  # Ray's, by name
        self._counted: dict[Series, float] = {}
        self._gauges: set[Series] = set()

    async def run_forever(self) -> None:
        """Copy every value again and again."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self._refresh()
            # Reading hundreds of series takes a few milliseconds: not on the event loop.
            await asyncio.to_thread(self._export)

    def _export(self) -> None:
        gauges: set[Series] = set()
        for family in self._recorder.collect():
            for sample in family.samples:
                # Ray's names have no colon, and its own vLLM's are told likewise.
                name, tags = sample.name.replace(":", "_"), dict(sample.labels)
                series = name, tuple(sorted(tags.items()))
                if family.type != "counter":
                    self._metric(ray_metrics.Gauge, name, family, tags).set(sample.value, tags=tags)
                    gauges.add(series)
                    continue
                increment = sample.value - self._counted.get(series, 0.0)
                self._counted[series] = sample.value
                if increment > 0:
                    # Ray appends `_total` to counters itself.
                    name = name.removesuffix("_total")
                    self._metric(ray_metrics.Counter, name, family, tags).inc(increment, tags=tags)
        for name, labels in self._gauges - gauges:
            # Ray's agent would repeat the last value of what is no more, for ever.
            self._metrics[name].set(0.0, tags=dict(labels))
        self._gauges = gauges

    def _metric(self, kind: Any, name: str, family: Family, tags: Mapping[str, str]) -> Any:
        if name not in self._metrics:
            self._metrics[name] = kind(name, description=family.documentation, tag_keys=tuple(tags))
        return self._metrics[name]
