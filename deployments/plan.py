"""The plan that `drafthouse check` prints: who runs where, and what it will take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.config.schema import Config, CoordinatorConfig, EngineConfig, PlacementConfig
from deployments.access import access_lines
from deployments.configured_models import engines
from deployments.placement import total_resources
from deployments.preflight import TARGET, Inspected

# Cards that people have, from one for games to an H200.
_GPU_SIZES_GB = (24, 48, 80, 141)


def plan(config: Config, found: Mapping[str, Inspected]) -> str:
    """The plan as text for people.  found: what the models on this machine are."""
    return "\n".join(_lines(config, found)) + "\n"


def _lines(config: Config, found: Mapping[str, Inspected]) -> Iterator[str]:
    yield f"model {config.model_name}"
    yield ""
    yield f"{'deployment':<20} {'replicas':>8}  each replica reserves"
    ranks = config.target.engine.tensor_parallel
    yield _row("ingress", config.ingress.replicas, config.ingress.placement)
    yield _row("coordinator", config.coordinator.replicas, config.coordinator.placement)
    yield _row("target", config.target.replicas, config.target.placement, ranks)
    for name in config.pool:
        drafter = config.drafters[name]
        yield _row(f"drafter-{name}", drafter.replicas, drafter.reserved)
    total = total_resources(config)
    yield f"{'in all':<20} {'':>8}  " + _amounts(total)
    if config.coordinator.replicas > 1:
        yield _shares(config.coordinator)
    yield ""
    columns = f"{'weights':>10} {'KV, 1k tokens':>14} {'context':>9} {'tokens':>9}"
    yield f"{'engine':<32} {columns}  model"
    for path, engine in engines(config).items():
        yield _engine_row(path, engine, found.get(path))
    for path, inspected in found.items():
        if inspected.weights:
            yield f"{path}: {inspected.weights}"
    yield from _caches(config, found)
    compared = sum(each.is_here for each in found.values()) - 1
    if TARGET in found and found[TARGET].is_here and compared > 0:
        yield f"the tokenizers of target and {compared} draft models are the same"
    yield ""
    for name in config.drafters:
        yield f"drafter {name}: {_place(config, name)}"
    yield ""
    yield from access_lines(config)
    for task in config.tasks or {"default": ()}:
        yield f"task {task}: " + (", ".join(config.drafters_of(task)) or "no drafters")


def _shares(limits: CoordinatorConfig) -> str:
    return (
        f"the {limits.replicas} coordinators share {limits.max_running_sequences} running and "
        f"{limits.max_queued_requests} queued requests"
    )


def _place(config: Config, name: str) -> str:
    """Where a drafter runs, and why."""
    drafter = config.drafters[name]
    if name in config.stage_of:
        return f"a stage of {config.stage_of[name]}"
    if name in config.residents:
        why = " (auto: it names no other device, replicas or nice)"
        return f"inside the target, by turns with its steps{why * (drafter.placement == 'auto')}"
    if drafter.placement != "auto":
        return "in the pool, as placed"
    target = config.target.engine.device
    if drafter.replicas > 1 or drafter.nice > 0:
        return "in the pool (auto: it has replicas or nice, which only its own processes can have)"
    return f"in the pool (auto: its engine is on {drafter.device}, the target's on {target})"


def _row(name: str, replicas: int, placement: PlacementConfig, ranks: int = 1) -> str:
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    text = _amounts({key: amount for key, amount in wanted.items() if amount > 0})
    if ranks > 1:
        text = f"{ranks} ranks on one node, each: {text}"
    if placement.labels:
        text += "; nodes with " + ", ".join(f"{k}={v}" for k, v in placement.labels.items())
    return f"{name:<20} {replicas:>8}  {text}"


def _engine_row(path: str, engine: EngineConfig, found: Inspected | None) -> str:
    if found is None:
        unknown = f"{'unknown':>10} {'unknown':>14} {'unknown':>9} {'unknown':>9}"
        return f"{path:<32} {unknown}  {engine.model} (not on this machine, so not compared)"
    weights, kv = _size(found.sizes.weights), _size(found.sizes.kv_per_token * 1024)
    limits = f"{found.max_context_len:>9,} {found.vocab_size:>9,}"
    what = found.architecture
    if not found.is_here:
        what += ", not on this machine: sized by its configuration, not compared"
    return f"{path:<32} {weights:>10} {kv:>14} {limits}  {engine.model} ({what})"


def _caches(config: Config, found: Mapping[str, Inspected]) -> Iterator[str]:
    """The size of each KV cache; on a GPU, what cards of some sizes have left for it."""
    on_gpus = []
    for path, engine in engines(config).items():
        if path not in found:
            continue
        sizes = found[path].sizes
        if sizes.kv_cache:
            tokens = sizes.kv_cache // sizes.kv_per_token
            yield f"{path}: a KV cache of {_size(sizes.kv_cache)}, {tokens:,} tokens"
        elif not any(path.startswith(f"drafters.{name}.") for name in config.hosted):
            on_gpus.append((path, engine, sizes))
    if not on_gpus:
        return
    yield ""
    columns = "".join(f"{f'{size} GB':>11}" for size in _GPU_SIZES_GB)
    yield f"{'tokens of KV cache on GPUs of':<32}{columns}  beside weights of"
    for path, engine, sizes in on_gpus:
        rooms = [sizes.room(engine, size * 1e9) for size in _GPU_SIZES_GB]
        columns = "".join(f"{f'{room:,}' if room else 'none':>11}" for room in rooms)
        ranks = f" on each of {engine.tensor_parallel} GPUs" * (engine.tensor_parallel > 1)
        yield f"{path:<32}{columns}  {_size(sizes.rank_weights)}{ranks}"


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
