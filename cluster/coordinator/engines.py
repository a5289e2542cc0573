"""The engines of targets and drafters, and what they compute with, in metrics and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from cluster import metrics
from cluster.messages import WorkerDescription
from cluster.metrics.recorder import Recorder
from cluster.models.engine_state import EngineState


class Worker(Protocol):
    """A target's seat or a drafter's replica."""

    id: str
    description: WorkerDescription


def record_engines(recorder: Recorder, worker: str, description: WorkerDescription) -> None:
    """Export them from now on.  worker: the id under which the coordinator knows it."""
    for engine in description.engines:
        owner = _owner(worker, description, engine)
        recorder.set(metrics.ENGINE, 1, **owner, **_info(engine))
        recorder.set(metrics.ENGINE_FALLBACKS, len(engine.fallbacks), **owner)


def forget_engines(recorder: Recorder, worker: str, description: WorkerDescription) -> None:
    """The worker has left."""
    for engine in description.engines:
        owner = _owner(worker, description, engine)
        recorder.forget(metrics.ENGINE, **owner, **_info(engine))
        recorder.forget(metrics.ENGINE_FALLBACKS, **owner)


def reported(workers: Iterable[Worker]) -> list[dict[str, object]]:
    """All of them as plain values, for status reports."""
    return [
        {"role": each.description.role, "worker": each.id, **dataclasses.asdict(engine)}
        for each in workers
        for engine in each.description.engines
    ]


def _owner(worker: str, description: WorkerDescription, engine: EngineState) -> dict[str, str]:
    return {"role": description.role, "worker": worker, "engine": engine.name}


def _info(engine: EngineState) -> dict[str, str]:
    return {
        "device": engine.device,
        "attention": engine.attention,
        "graphs": engine.graphs,
        "kernels": engine.kernels,
        "weights": engine.weights,
    }
