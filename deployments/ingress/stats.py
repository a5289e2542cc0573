"""The figures of /stats: a few totals of /metrics as JSON, for whoever has no Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster import metrics
from cluster.metrics import Metric, vllm_metrics
from deployments.metrics_reader import Page


@dataclass(frozen=True, slots=True)
class _Series:
    """A page of metrics, by our own names of them."""

    page: Page

    def values(self, metric: Metric) -> list[float]:
        """Of all processes and labels."""
        return list(self.page.samples.get(_name(metric), {}).values())

    def total(self, metric: Metric) -> float:
        return _plain(sum(self.values(metric)))

    def by(self, metric: Metric, label: str) -> dict[str, float]:
        """Return the sums of each value of the label."""
        sums = self.page.by(_name(metric), label)
        return {value: _plain(number) for value, number in sums.items()}


def _name(metric: Metric) -> str:
    return f"{metric.name}{'_total' if metric.kind == 'counter' else ''}"


def stats_of(page: bytes, model_name: str) -> dict[str, Any]:
    """Return what a page of metrics amounts to: counts since the processes began, and the moment's
    gauges."""
    series = _Series(Page.read(page.decode()))
    rates = series.by(metrics.TOKEN_RATE, "kind")
    return {
        "model": model_name,
        "spec_decode": _spec_decode(series),
        "requests": {
            "running": series.total(metrics.RUNNING),
            "waiting": series.total(metrics.QUEUED),
            "finished": series.by(metrics.REQUESTS, "finish_reason"),
            "rejected": series.total(metrics.REJECTED),
        },
        "tokens": {
            "prompt": series.total(metrics.PROMPT_TOKENS),
            "prompt_cached": series.total(vllm_metrics.CACHED_TOKENS),
            "generation": series.total(metrics.OUTPUT_TOKENS),
        },
        "tokens_per_s": {"prompt": rates.get("prompt", 0), "generation": rates.get("output", 0)},
        # Every coordinator sees the same targets.
        "kv_cache_usage": max(series.values(vllm_metrics.KV_USAGE), default=0.0),
        "missing_processes": series.total(metrics.MISSING_PROCESSES),
    }


def _spec_decode(series: _Series) -> dict[str, Any]:
    num_drafts = series.total(metrics.SPEC_STEPS)
    drafted = series.by(metrics.NUM_DRAFT_TOKENS, "drafter")
    accepted = series.by(metrics.NUM_ACCEPTED_TOKENS, "drafter")
    by_place = series.by(metrics.NUM_ACCEPTED_PER_POS, "position")
    speedups = series.values(metrics.SPEEDUP)
    return {
        "num_drafts": num_drafts,
        **_acceptance(sum(drafted.values()), sum(accepted.values())),
        "num_accepted_tokens_per_pos": [by_place[place] for place in sorted(by_place, key=int)],
        "mean_acceptance_length": 1.0 + _ratio(sum(accepted.values()), num_drafts),
        "estimated_speedup": _ratio(sum(speedups), len(speedups)) or 1.0,
        "plain_steps": series.by(metrics.PLAIN_STEPS, "why"),
        "by_drafter": {
            name: _acceptance(count, accepted.get(name, 0)) for name, count in drafted.items()
        },
    }


def _acceptance(num_drafted: float, num_accepted: float) -> dict[str, float]:
    return {
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "acceptance_rate": _ratio(num_accepted, num_drafted),
    }


def _plain(number: float) -> float:
    """Return a count as the integer that it is."""
    return int(number) if number == int(number) else number


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
