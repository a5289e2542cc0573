"""PromQL over our metrics; that a metric has the labels which a query asks for is checked here."""

from __future__ import annotations

from cluster.metrics import Metric

# Grafana fills in both: the jobs that were chosen above the panels, and a window that has at least
# four scrapes.
_JOBS = 'job=~"$job"'
_WINDOW = "$__rate_interval"


def rate(metric: Metric, *by: str, only: str = "") -> str:
    """Return the increase of a counter per second, added up over all but the labels `by`.

    only: further matchers.  Of a histogram it is that of its sum.
    """
    suffix = {"counter": "_total", "histogram": "_sum"}[metric.kind]
    return _over("sum", metric, by, f"rate({_selector(metric, suffix, only)}[{_WINDOW}])")


def share(part: Metric, whole: Metric, *by: str, only: str = "") -> str:
    """Return the increase of one counter for each of another's.

    by: labels of the first; those that the other lacks divide its whole.  only: matchers of the
    first.
    """
    lacking = [label for label in by if label not in whole.labels]
    matching = f"/ ignoring ({', '.join(lacking)}) group_left" if lacking else "/"
    shared = [label for label in by if label in whole.labels]
    return f"{rate(part, *by, only=only)} {matching} {rate(whole, *shared)}"


def mean(metric: Metric, *by: str) -> str:
    """Return the mean observation of a histogram."""
    count = f"rate({_selector(metric, '_count')}[{_WINDOW}])"
    return f"{rate(metric, *by)} / {_over('sum', metric, by, count)}"


def quantiles(metric: Metric) -> dict[str, str]:
    """Return, by legend, what half of the observations are below, 95 % and 99 %."""
    return {f"p{percent}": _quantile(percent / 100, metric) for percent in (50, 95, 99)}


def gauge(how: str, metric: Metric, *by: str) -> str:
    """Return a gauge over all processes.  how: sum of what each has, max of what all look at."""
    return _over(how, metric, by, _selector(metric))


def or_zero(query: str) -> str:
    """Return a query that is 0 where there is no series yet: nothing of the kind has happened."""
    return f"{query} or vector(0)"


def _quantile(part: float, metric: Metric) -> str:
    buckets = f"rate({_selector(metric, '_bucket')}[{_WINDOW}])"
    return f"histogram_quantile({part:g}, {_over('sum', metric, ('le',), buckets)})"


def _selector(metric: Metric, suffix: str = "", only: str = "") -> str:
    return f"{metric.name}{suffix}{{{', '.join(filter(None, (_JOBS, only)))}}}"


def _over(how: str, metric: Metric, by: tuple[str, ...], vector: str) -> str:
    unknown = set(by) - {*metric.labels, "le"}
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(unknown)}; it has {metric.labels}")
    return f"{how} by ({', '.join(by)}) ({vector})" if by else f"{how}({vector})"
