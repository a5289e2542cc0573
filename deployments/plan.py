"""The plan that `drafthouse check` prints: who runs where, and what it will take."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import Config, EngineConfig, PlacementConfig
from deployments.models import engines, estimate
from deployments.placement import total_resources


def plan(config: Config) -> str:
    """The plan as text for people."""
    return "\n".join(_lines(config)) + "\n"


def _lines(config: Config) -> Iterator[str]:
    yield f"model {config.model_name}"
    yield ""
    yield f"{'deployment':<20} {'replicas':>8}  each replica reserves"
    ranks = config.target.engine.tensor_parallel
    yield _row("ingress", config.ingress.replicas, config.ingress.placement)
    yield _row("coordinator", config.coordinator.replicas, config.coordinator.placement)
    yield _row("target", config.target.replicas, config.target.placement, ranks)
    for name, drafter in config.drafters.items():
        yield _row(f"drafter-{name}", drafter.replicas, drafter.placement)
    total = total_resources(config)
    yield f"{'in all':<20} {'':>8}  " + _amounts(total)
    yield ""
    yield f"{'engine':<32} {'weights':>10} {'KV, 1k tokens':>14}  model"
    for path, engine in engines(config).items():
        yield _engine_row(path, engine)
    yield ""
    for task in config.tasks or {"default": ()}:
        yield f"task {task}: " + (", ".join(config.drafters_of(task)) or "no drafters")


def _row(name: str, replicas: int, placement: PlacementConfig, ranks: int = 1) -> str:
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    text = _amounts({key: amount for key, amount in wanted.items() if amount > 0})
    if ranks > 1:
        text = f"{ranks} ranks on one node, each: {text}"
    if placement.labels:
        text += "; nodes with " + ", ".join(f"{k}={v}" for k, v in placement.labels.items())
    return f"{name:<20} {replicas:>8}  {text}"


def _engine_row(path: str, engine: EngineConfig) -> str:
    found = estimate(engine)
    if found is None:
        return f"{path:<32} {'unknown':>10} {'unknown':>14}  {engine.model} (not on this machine)"
    weights, kv = _size(found.weights), _size(found.kv_per_token * 1024)
    return f"{path:<32} {weights:>10} {kv:>14}  {engine.model}"


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
