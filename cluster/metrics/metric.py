"""The form of a metric."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

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

    def series(self, registry: CollectorRegistry | None = None) -> Any:
        """Make what holds its values, the counter, gauge or histogram of Prometheus' client; with a
        registry it is read with all others there."""
        make: Any = {
            "counter": Counter,
            "gauge": Gauge,
            "histogram": partial(Histogram, buckets=self.buckets),
        }[self.kind]
        return make(self.name, self.help, self.labels, registry=registry)


# They take what follows the kind.
counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")
