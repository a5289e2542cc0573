"""What `drafthouse check` prints, who runs where and what it will take; and `drafthouse plan`, the
memory that a configuration takes, and what its drafts should bring."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.config.processes import RECORDER
from cluster.config.schema import Config
from cluster.draft import registry
from cluster.errors import ConfigError
from cluster.spec import step_profile
from cluster.spec.step_profile import Speedup
from deployments.access import access_lines
from deployments.configured_models import TARGET, ConfiguredEngine, engines
from deployments.memory_plan import (
    Gpus,
    MemoryPlan,
    asked_gpus,
    gpus_of_rank,
    memory_plan,
    planned_gpus,
    warnings,
)
from deployments.placement import placed, total_resources
from deployments.preflight import Inspected, inspect
from deployments.report import printed

# Cards that people have, from one for games to an H200.
_GPU_SIZES_GB = (24, 48, 80, 141)


def check_text(config: Config, arguments: argparse.Namespace) -> str:
    """Return what `drafthouse check` prints; raises ConfigError for what would stop it."""
    # On loopback all parts run on one machine, which is this one where no other is named.
    is_here = asked_gpus(config, arguments) is None and config.network.interface == "loopback"
    told = facts(config, inspect(config, is_here=is_here, is_plan=True), is_here=is_here)
    return printed("check", told, as_json=arguments.json)


def facts(config: Config, found: Mapping[str, Inspected], *, is_here: bool) -> dict[str, Any]:
    """The plan for programs: all that the text says, sizes in bytes.

    found: what the models on this machine are.  is_here: the application is to run on it."""
    limits = config.coordinator
    compared = sum(each.is_here and not each.vocabulary for each in found.values()) - 1
    return {
        "model": config.model_name,
        "deployments": [
            {
                "name": name,
                "replicas": each.replicas,
                "ranks": each.ranks,
                "reserves": each.reserves,
                "labels": dict(each.placement.labels),
            }
            for name, each in placed(config).items()
        ],
        "reserved": total_resources(config),
        "coordinators": {
            "replicas": limits.replicas,
            "max_running_sequences": limits.max_running_sequences,
            "max_queued_requests": limits.max_queued_requests,
        },
        "engines": [_engine(config, each, found.get(each.path)) for each in engines(config)],
        "compared_tokenizers": compared if TARGET in found and found[TARGET].is_here else 0,
        "drafters": {
            name: _place(config, name) + _rollout(config, name) for name in config.drafters
        },
        "refused": [*registry.refusals(registry.refused_here(config.drafters) if is_here else {})],
        "access": [*access_lines(config)],
        "tasks": {task: [*config.drafters_of(task)] for task in config.tasks or ("default",)},
    }


def _engine(
    config: Config, configured: ConfiguredEngine, found: Inspected | None
) -> dict[str, Any]:
    """What is known of one engine; sizes only where its configuration is."""
    drafter, engine = configured.drafter, configured.settings
    known: dict[str, Any] = {"path": configured.path, "model": engine.model, "is_here": False}
    if found is None:
        return known
    sizes, described = found.sizes, found.described
    known |= {
        "is_here": found.is_here,
        "architecture": described.architecture,
        "weights_format": described.weights,
        "other_vocabulary": found.vocabulary,
        "weights_bytes": sizes.weights,
        "kv_bytes_per_token": sizes.kv_per_token,
        "max_context_len": described.max_context_len,
        "vocab_size": described.vocab_size,
    }
    if sizes.kv_cache:
        tokens = sizes.kv_cache // sizes.kv_per_token
        return known | {
            "kv_cache_bytes": sizes.kv_cache,
            "kv_cache_tokens": tokens,
            "state_bytes": sizes.states,
        }
    if drafter in config.hosted:
        return known
    num_gpus = gpus_of_rank(config, drafter)
    return known | {
        "rank_weights_bytes": sizes.rank_weights // num_gpus,
        "ranks": engine.tensor_parallel * num_gpus,
        "memory_share": sizes.share(engine),
        "step_bytes": sizes.steps,
        "step_rows": engine.max_batch_tokens,
        "logit_rows": sizes.logit_rows,
        "graph_bytes": sizes.graphs,
        "state_bytes": sizes.states,
        "kv_tokens_by_gpu_gb": {
            str(size): sizes.room(engine, size * 1e9, num_gpus) for size in _GPU_SIZES_GB
        },
    }


def _place(config: Config, name: str) -> str:
    """Where a drafter runs, and why."""
    drafter = config.drafters[name]
    if drafter.kind == RECORDER:
        return _recorder(config, name)
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


def _recorder(config: Config, name: str) -> str:
    """Whose answers are kept, and where."""
    options = registry.check(name, config.drafters[name])
    if options.tenants == "none" or not options.share:
        return "keeps nobody's answers (tenants: none)"
    whose = "all requests" if options.tenants == "all" else "requests with neither API key nor salt"
    where = Path(options.folder).absolute()
    kept = f"in {where}" if options.keep == "disk" else f"in memory, until asked for in {where}"
    return f"keeps the answers to {100 * options.share:.3g}% of {whose}, {kept}"


def _rollout(config: Config, name: str) -> str:
    rollout = config.drafters[name].rollout
    return "" if rollout is None else f"; replaces {rollout.replaces} once it drafts better"


# `drafthouse plan`.

REQUESTS = (1, 4, 16, 64)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


def plan_text(config: Config, arguments: argparse.Namespace) -> str:
    """Return what the command prints.

    Raises ConfigError for numbers that make no sense, for what could be served nowhere, and where
    --measure cannot load a model."""
    if not 0.0 <= arguments.acceptance <= 1.0 or arguments.draft_tokens < 1:
        raise ConfigError("--acceptance is a number from 0 to 1, --draft-tokens 1 or more")
    if arguments.task not in (known := {"default", *config.tasks}):
        raise ConfigError(f"--task: no class {arguments.task!r} ({', '.join(sorted(known))})")
    on = planned_gpus(config, arguments)
    is_here = on is None or arguments.measure
    if arguments.measure and arguments.gpu is not None:
        raise ConfigError("--measure: loads the models on this machine; leave --gpu out")
    found = inspect(config, is_here=is_here, is_plan=True)
    return printed("plan", _forecast(config, found, arguments, on), as_json=arguments.json)


def _forecast(
    config: Config, found: Mapping[str, Inspected], arguments: argparse.Namespace, on: Gpus | None
) -> dict[str, Any]:
    """Return the whole plan, as --json prints it; None = not known, or not measured.

    speedup: of one request at a time; acceptance is conditional, accepted_share is accepted /
    drafted, as servers report it, and cost is Leviathan's c.  loads: by the measured curve, and
    without one by Leviathan's formula, which is the same for any number of requests."""
    base, free = 0, None
    if on is None:  # a GPU's memory is another than that of the process
        # This process imports what a target's does, so that it takes as much.
        import deployments.target  # noqa: F401
        from cluster.engine.device import free_cpu_bytes
        from cluster.worker.target_parts import resident_bytes

        base, free = resident_bytes(), free_cpu_bytes()
    memory = memory_plan(config, found, base, on)
    acceptance, num_drafts = arguments.acceptance, arguments.draft_tokens
    cost = _draft_cost(config, memory, arguments.task)
    measured, curves = None, dict[int, Speedup]()
    if arguments.measure:
        measured, curves = _measure(config, arguments, base)
        cost = measured["draft_token_s"] / measured["step_s"]
    by_leviathan = None if cost is None else functools.partial(step_profile.by_leviathan, cost=cost)
    speedup = {
        "acceptance": acceptance,
        "draft_tokens": num_drafts,
        "accepted_share": step_profile.accepted_share(acceptance, num_drafts),
        "guide": step_profile.by_guide(acceptance, num_drafts),
        "leviathan": by_leviathan(acceptance, num_drafts) if by_leviathan else None,
        "cost": cost,
        "measured": curves[1](acceptance, num_drafts) if curves else None,
    }
    if by_leviathan and not curves:
        curves = {1: by_leviathan}
    return {
        "model": config.model_name,
        "gpus": on and asdict(on),
        "splits": [*_splits(config, found.get(TARGET), on)],
        "memory": asdict(memory),
        "total_bytes": None if TARGET in memory.unsized else memory.total,
        "free_bytes": free,
        "measured": measured,
        "speedup": speedup,
        "loads": [_at_load(count, curve) for count, curve in curves.items()],
        "warnings": [*map(asdict, warnings(memory, cost if measured else None))],
    }


def _measure(
    config: Config, arguments: argparse.Namespace, base: int
) -> tuple[dict[str, Any], dict[int, Speedup]]:
    """Return what was measured of one target process here, see
    `cluster.worker.target_parts`, and the speed-up by the requests at a time."""
    from cluster.worker.target_parts import try_here

    trial, num_drafts = try_here(config, arguments.task), arguments.draft_tokens
    draft_s = trial.costs.draft_s(1, num_drafts, with_models=trial.with_models)
    measured = {
        "total": base + trial.weights + trial.drafters + trial.kv_cache,
        "weights": trial.weights,
        "drafters": trial.drafters,
        "kv_cache": trial.kv_cache,
        "step_s": float(trial.costs.steps.at([1])[0]),
        "draft_token_s": draft_s / num_drafts,
        "refused": trial.refused,
    }
    return measured, {n: trial.costs.speedup(n, with_models=trial.with_models) for n in REQUESTS}


def _draft_cost(config: Config, memory: MemoryPlan, task: str) -> float | None:
    """Return c by the weights that a token needs, of the slowest of a task's drafters; None = that
    of one is not known.  A look-up costs nothing."""
    read = {each.name: each.read for each in memory.models}
    if "" not in read:
        return None
    costs = [0.0]
    for name in config.drafters_of(task):
        for part in config.drafters[name].stages or (name,):
            kind = registry.drafter_class(config.drafters[part].kind)
            if not (getattr(kind, "is_look_up", False) or part in read):
                return None
            costs.append(read.get(part, 0) / read[""])
    return max(costs)


def _splits(config: Config, target: Inspected | None, on: Gpus | None) -> Iterator[dict[str, Any]]:
    """Yield the ways to divide the target between GPUs that are named: ranks and, where the engine
    takes no number of them, a device map.

    gpu_weights: of each GPU.  num_tokens: of the KV cache, 0 = it does not fit.  step_s: in which
    the weights are read.  refused: why the engine does not take it, "" = it does."""
    if on is None or not on.memory or target is None:
        return
    folder, active = target.folder, target.sizes.active
    from cluster.engine.loading.inspection import describe
    from cluster.engine.loading.planned import planned

    def split(ranks: int, gpus: int) -> dict[str, Any]:
        found = {
            "ranks": ranks,
            "gpus": gpus,
            "gpu_weights": 0,
            "num_tokens": 0,
            "step_s": None,
            "refused": "",
        }
        device_map = "auto" if gpus > ranks else None
        engine = replace(config.target.engine, tensor_parallel=ranks, device_map=device_map)
        try:
            described = describe(folder, engine)
        except ConfigError as error:
            return found | {"refused": error.message}
        sizes = planned(folder, described, engine, is_here=False)
        # Layers that are spread are read one after the other.
        step_s = sizes.rank_weights * active / (on.bandwidth or math.inf)
        return found | {
            "gpu_weights": sizes.rank_weights * ranks // gpus,
            "num_tokens": sizes.room(engine, on.memory, gpus // ranks),
            "step_s": step_s or None,
        }

    counts = [2**power for power in range(on.count.bit_length())]
    found = [split(count, count) for count in counts]
    yield from found
    if all(each["refused"] for each in found[1:]):
        yield from (split(1, count) for count in counts[1:])


def _at_load(requests: int, curve: Speedup) -> dict[str, Any]:
    """Return the drafts that pay for so many requests at a time.

    break_even: the least acceptance from which some do, None = none do.  best: by acceptance, the
    draft tokens (0 = none) and the speed-up."""
    lengths = {each: step_profile.best_length(curve, each) for each in ACCEPTANCES}
    best = {each: (num, curve(each, num) if num else 1.0) for each, num in lengths.items()}
    return {"requests": requests, "break_even": step_profile.break_even(curve), "best": best}
