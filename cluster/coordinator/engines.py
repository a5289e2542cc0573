"""What engines of targets and drafters compute with, in metrics and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from cluster import metrics
from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.targets import TargetSeat
from cluster.metrics.recorder import Recorder

Worker = TargetSeat | DrafterReplica


def record_workers(recorder: Recorder, workers: Iterable[Worker]) -> None:
    """Export the engines and the pages of those that are here."""
    gauges = metrics.ENGINE, metrics.ENGINE_FALLBACKS, metrics.KV_PAGES_IN_USE
    for gauge in (*gauges, metrics.KV_PAGES_TOTAL):
        recorder.clear(gauge)
    for each in workers:
        own = {"role": each.description.role, "worker": each.id}
        if each.pages is not None:
            recorder.set(metrics.KV_PAGES_IN_USE, each.pages[0], **own)
            recorder.set(metrics.KV_PAGES_TOTAL, each.pages[1], **own)
        for engine in each.description.engines:
            labels = {"engine": engine.name, **own}
            recorder.set(metrics.ENGINE_FALLBACKS, len(engine.fallbacks), **labels)
            told = ("device", "attention", "graphs", "kernels", "weights")
            labels |= {name: getattr(engine, name) for name in told}
            recorder.set(metrics.ENGINE, 1, **labels)


def reported(workers: Iterable[Worker]) -> list[dict[str, object]]:
    """All engines as plain values, for status reports."""
    return [
        {"role": each.description.role, "worker": each.id, **dataclasses.asdict(engine)}
        for each in workers
        for engine in each.description.engines
    ]
