"""Mirrors our metrics into Ray's metrics agent, so that the dashboard's Prometheus has them.

Ray exports them with the prefix `ray_` and a few seconds' delay; our own /metrics is live.  The
mirror runs on a timer of its own and costs no token anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from ray.util import metrics as ray_metrics

from cluster.metrics.recorder import Recorder

log = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]

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
        self._series: dict[str, Any] = {}
        self._exported: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], Any] = {}

    async def run_forever(self) -> None:
        """Copy every value again and again."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            self._refresh()
            # Reading hundreds of series takes a few milliseconds: not on the event loop.
            await asyncio.to_thread(self._export)

    def _export(self) -> None:
        gone = set(self._gauges)
        for family in self._recorder.collect():
            for sample in family.samples:
                # Ray's names have no colon, and its own vLLM's are told likewise.
                name, labels = sample.name.replace(":", "_"), dict(sample.labels)
                gone.discard((name, _key(labels)))
                self._export_sample(family, name, labels, sample.value)
        for name, tags in gone:
            # Ray's agent would repeat the last value of what is no more, for ever.
            self._gauges.pop((name, tags)).set(0.0, tags=dict(tags))

    def _export_sample(self, family: Family, name: str, tags: dict[str, str], value: float) -> None:
        if family.type != "counter":
            gauge = self._get(family, name, ray_metrics.Gauge, tuple(tags))
            gauge.set(value, tags=tags)
            self._gauges[name, _key(tags)] = gauge
            return
        key = (name, _key(tags))
        increment = value - self._exported.get(key, 0.0)
        self._exported[key] = value
        if increment > 0:
            # Ray appends `_total` to counters itself.
            name = name.removesuffix("_total")
            counter = self._get(family, name, ray_metrics.Counter, tuple(tags))
            counter.inc(increment, tags=tags)

    def _get(self, family: Family, name: str, kind: Any, tag_keys: tuple[str, ...]) -> Any:
        if name not in self._series:
            self._series[name] = kind(name, description=family.documentation, tag_keys=tag_keys)
        return self._series[name]


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))
