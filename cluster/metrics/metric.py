"""The form of a metric."""

from __future__ import annotations

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.records import frozen

# Rounds of small models take fractions of a millisecond, long prefills of large ones seconds.
_SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
)

# All bounds that vLLM has, since `vllm_metrics` tells the same series under its names; and
# finer ones below them, because small models write a token within a millisecond.
TTFT_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
ITL_SECONDS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)


@frozen
class Metric:
    """One time series family.  Counters are exported with `_total`."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS

    @property
    def sample(self) -> str:
        """The name of its values on a page, for one that is no histogram."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def series(self, registry: CollectorRegistry | None = None) -> Counter | Gauge | Histogram:
        """Make what holds its values; with a registry it is read with all others there."""
        told = self.name, self.help, self.labels
        match self.kind:
            case "counter":
                return Counter(*told, registry=registry)
            case "gauge":
                return Gauge(*told, registry=registry)
        return Histogram(*told, registry=registry, buckets=self.buckets)


# They take what follows the kind.
counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")
