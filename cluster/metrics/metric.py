"""The form of a metric."""

from __future__ import annotations

from functools import partial
from typing import Literal

from cluster.records import frozen

Kind = Literal["counter", "gauge", "histogram"]

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

TOKENS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
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

# Few: there are as many histograms as segments.
SEGMENT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@frozen
class Metric:
    """One time series family.  Counters are exported with `_total`."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = _SECONDS


# They take what follows the kind.
counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")
