"""Builds /metrics, the series of every process that records metrics side by side; and /stats, its
few totals as JSON for whoever has no Prometheus.

Any ingress replica may answer a scrape.  So each sample has the name of its process as a label and
nothing is added up: a counter belongs to one process and never falls while that process lives.  A
process that does not answer in time is missing from that scrape, which counts the missing ones.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from cluster import metrics
from cluster.errors import DrafthouseError
from cluster.metrics import Metric, vllm_metrics
from cluster.metrics.recorder import Recorder, side_by_side
from cluster.records import frozen
from cluster.rpc.channel import CoordinatorLink
from deployments.metrics_reader import Page


@frozen
class _Series:
    """A page of metrics, by our own names of them."""

    page: Page

    def values(self, metric: Metric) -> list[float]:
        """Of all processes and labels."""
        return [sample.value for sample in self.page.samples.get(_name(metric), ())]

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


log = logging.getLogger(__name__)

# Half of Prometheus' default time limit for a scrape.
_TIMEOUT_S = 5.0


T = TypeVar("T")


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


async def answers_of(
    links: Mapping[str, CoordinatorLink], question: Callable[[CoordinatorLink], Awaitable[T]]
) -> list[T]:
    """What those coordinators said that answered."""

    async def ask(name: str, link: CoordinatorLink) -> list[T]:
        try:
            return [await question(link)]
        except DrafthouseError as error:
            log.info("coordinator id=%s did not answer: %s", name, error)
            return []

    answers = await asyncio.gather(*(ask(*each) for each in links.items()))
    return [answer for found in answers for answer in found]


def seen_by(owner: str, page: bytes, *, is_general: bool) -> bytes:
    """Return what the owner of that key sees of a page: of the series by key its own, and those of
    no key if `is_general`."""
    lines = []
    for line in page.decode().splitlines(keepends=True):
        key = _KEY.search(line)
        if line.startswith("#") or (key[1] == owner if key else is_general):
            lines.append(line)
    return "".join(lines).encode()
