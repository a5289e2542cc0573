"""Builds /metrics, the series of every process that records metrics side by side; and /stats, its
few totals as JSON for whoever has no Prometheus.

Any ingress replica may answer a scrape.  So each sample has the name of its process as a label and
nothing is added up: a counter belongs to one process and never falls while that process lives.  A
process that does not answer in time is missing from that scrape, which counts the missing ones.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from cluster import metrics
from cluster.metrics import Metric, vllm_metrics
from cluster.metrics.recorder import Recorder, side_by_side
from cluster.rpc.channel import CoordinatorLink
from deployments.ingress.coordinators import answers_of
from deployments.metrics_reader import Page


def _total(page: Page, metric: Metric) -> float:
    """Of all processes and labels."""
    return _plain(page.total(metric.sample) or 0.0)


def _by(page: Page, metric: Metric, label: str) -> dict[str, float]:
    """Return the sums of each value of the label."""
    return {value: _plain(number) for value, number in page.by(metric.sample, label).items()}


def stats_of(page: bytes, model_name: str) -> dict[str, Any]:
    """Return what a page of metrics amounts to: counts since the processes began, and the moment's
    gauges."""
    read = Page.read(page.decode())
    rates = _by(read, metrics.TOKEN_RATE, "kind")
    return {
        "model": model_name,
        "spec_decode": _spec_decode(read),
        "requests": {
            "running": _total(read, metrics.RUNNING),
            "waiting": _total(read, metrics.QUEUED),
            "finished": _by(read, metrics.REQUESTS, "finish_reason"),
            "rejected": _total(read, metrics.REJECTED),
        },
        "tokens": {
            "prompt": _total(read, metrics.PROMPT_TOKENS),
            "prompt_cached": _total(read, vllm_metrics.CACHED_TOKENS),
            "generation": _total(read, metrics.OUTPUT_TOKENS),
        },
        "tokens_per_s": {"prompt": rates.get("prompt", 0), "generation": rates.get("output", 0)},
        # Every coordinator sees the same targets.
        "kv_cache_usage": max(read.values(vllm_metrics.KV_USAGE.sample), default=0.0),
        "missing_processes": _total(read, metrics.MISSING_PROCESSES),
    }


def _spec_decode(page: Page) -> dict[str, Any]:
    num_drafts = _total(page, metrics.SPEC_STEPS)
    drafted = _by(page, metrics.NUM_DRAFT_TOKENS, "drafter")
    accepted = _by(page, metrics.NUM_ACCEPTED_TOKENS, "drafter")
    by_place = _by(page, metrics.NUM_ACCEPTED_PER_POS, "position")
    speedups = page.values(metrics.SPEEDUP.sample)
    return {
        "num_drafts": num_drafts,
        **_acceptance(sum(drafted.values()), sum(accepted.values())),
        "num_accepted_tokens_per_pos": [by_place[place] for place in sorted(by_place, key=int)],
        "mean_acceptance_length": 1.0 + _ratio(sum(accepted.values()), num_drafts),
        "estimated_speedup": _ratio(sum(speedups), len(speedups)) or 1.0,
        "plain_steps": _by(page, metrics.PLAIN_STEPS, "why"),
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


# Half of Prometheus' default time limit for a scrape.
_TIMEOUT_S = 5.0


# Within another label's value the quote would be escaped.
_KEY = re.compile(r'[{,]key="([^"]*)"')

# Returns the texts of the other ingress replicas that answer in time.
AskOthers = Callable[[float], Awaitable[list[bytes]]]


async def nobody(timeout_s: float) -> list[bytes]:
    """The `AskOthers` of an ingress with only one replica."""
    return []


async def metrics_page(
    own: Recorder,
    coordinators: Mapping[str, CoordinatorLink],
    others: AskOthers,
    num_others: int,
) -> bytes:
    """The whole page.  own: this replica's recorder.  num_others: expected other replicas."""
    texts, found = await asyncio.gather(
        answers_of(coordinators, lambda link: link.metrics(_TIMEOUT_S)), others(_TIMEOUT_S)
    )
    scrape = Recorder(only=(metrics.MISSING_PROCESSES,))
    missing = {"coordinator": len(coordinators) - len(texts), "ingress": num_others - len(found)}
    for role, count in missing.items():
        scrape.set(metrics.MISSING_PROCESSES, max(count, 0), role=role)
    return side_by_side([scrape.render(), own.render(), *found, *texts])


def seen_by(owner: str, page: bytes, *, is_general: bool) -> bytes:
    """Return what the owner of that key sees of a page: of the series by key its own, and those of
    no key if `is_general`."""
    lines = []
    for line in page.decode().splitlines(keepends=True):
        key = _KEY.search(line)
        if line.startswith("#") or (key[1] == owner if key else is_general):
            lines.append(line)
    return "".join(lines).encode()
