"""`drafthouse plan`: the memory that a configuration takes, and what its drafts should bring."""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from cluster.config.schema import Config
from cluster.draft import registry
from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.spec import step_profile
from cluster.spec.step_profile import Speedup
from deployments import gpus
from deployments.gpus import Gpus
from deployments.memory_plan import MemoryPlan, Warned, folder_of, memory_plan, warnings
from deployments.preflight import TARGET, Inspected, inspect
from deployments.report import rendered

REQUESTS = (1, 4, 16, 64)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@frozen
class Measured:
    """What --measure has found of one target process, in bytes; see `cluster.worker.trial`."""

    total: int
    weights: int
    drafters: int
    kv_cache: int
    step_s: float
    draft_token_s: float
    refused: Mapping[str, str]


@frozen
class Expected:
    """The speed-up of drafts of `draft_tokens` tokens, of one request at a time.

    acceptance: conditional.  accepted_share: accepted / drafted, as servers report it.  cost:
    Leviathan's c.  None = not known, or not measured."""

    acceptance: float
    draft_tokens: int
    accepted_share: float
    guide: float
    leviathan: float | None
    cost: float | None
    measured: float | None


@frozen
class AtLoad:
    """The drafts that pay for so many requests at a time.

    break_even: the least acceptance from which some do, None = none do.  best: by acceptance, the
    draft tokens (0 = none) and the speed-up."""

    requests: int
    break_even: float | None
    best: Mapping[float, tuple[int, float]]


@frozen
class Split:
    """The target on so many ranks, or its layers spread over so many GPUs.  gpu_weights: of each.
    num_tokens: of the KV cache, 0 = it does not fit.  step_s: in which the weights are read, None =
    not known.  refused: why the engine does not take it, "" = it does."""

    ranks: int
    gpus: int
    gpu_weights: int = 0
    num_tokens: int = 0
    step_s: float | None = None
    refused: str = ""


@frozen
class Forecast:
    """The whole plan, as --json prints it.  gpus: None = for this CPU.  total_bytes: None = nothing
    is known of the target.  free_bytes: of this machine, None = for GPUs.  loads: by the measured
    curve, and without one by Leviathan's formula, which is the same for any number of requests;
    none where c is not known."""

    model: str
    gpus: Gpus | None
    splits: Sequence[Split]
    memory: MemoryPlan
    total_bytes: int | None
    free_bytes: int | None
    measured: Measured | None
    speedup: Expected
    loads: Sequence[AtLoad]
    warnings: Sequence[Warned]


def plan_text(config: Config, arguments: argparse.Namespace) -> str:
    """Return what the command prints.

    Raises ConfigError for numbers that make no sense, for what could be served nowhere, and where
    --measure cannot load a model."""
    if not 0.0 <= arguments.acceptance <= 1.0 or arguments.draft_tokens < 1:
        raise ConfigError("--acceptance is a number from 0 to 1, --draft-tokens 1 or more")
    if arguments.task not in (known := {"default", *config.tasks}):
        raise ConfigError(f"--task: no class {arguments.task!r} ({', '.join(sorted(known))})")
    on = gpus.planned_for(config, arguments)
    is_here = on is None or arguments.measure
    if arguments.measure and arguments.gpu is not None:
        raise ConfigError("--measure: loads the models on this machine; leave --gpu out")
    planned = asdict(
        _forecast(config, inspect(config, is_here=is_here, is_plan=True), arguments, on)
    )
    return json.dumps(planned, indent=2) + "\n" if arguments.json else rendered("plan", planned)


def _forecast(
    config: Config, found: Mapping[str, Inspected], arguments: argparse.Namespace, on: Gpus | None
) -> Forecast:
    base, free = 0, None
    if on is None:  # a GPU's memory is another than that of the process
        # This process imports what a target's does, so that it takes as much.
        import deployments.target  # noqa: F401
        from cluster.engine.device import free_cpu_bytes
        from cluster.worker.trial import resident_bytes

        base, free = resident_bytes(), free_cpu_bytes()
    memory = memory_plan(config, found, base, on)
    acceptance, num_drafts = arguments.acceptance, arguments.draft_tokens
    cost = _draft_cost(config, memory, arguments.task)
    measured, curves = None, dict[int, Speedup]()
    if arguments.measure:
        measured, curves = _measure(config, arguments, base)
        cost = measured.draft_token_s / measured.step_s
    by_leviathan = None if cost is None else functools.partial(step_profile.by_leviathan, cost=cost)
    expected = Expected(
        acceptance,
        num_drafts,
        step_profile.accepted_share(acceptance, num_drafts),
        step_profile.by_guide(acceptance, num_drafts),
        by_leviathan(acceptance, num_drafts) if by_leviathan else None,
        cost,
        curves[1](acceptance, num_drafts) if curves else None,
    )
    if by_leviathan and not curves:
        curves = {1: by_leviathan}
    return Forecast(
        config.model_name,
        on,
        [*_splits(config, memory, on)],
        memory,
        None if TARGET in memory.unsized else memory.total,
        free,
        measured,
        expected,
        [_at_load(count, curve) for count, curve in curves.items()],
        warnings(memory.models, memory.total, cost if measured else None),
    )


def _measure(
    config: Config, arguments: argparse.Namespace, base: int
) -> tuple[Measured, dict[int, Speedup]]:
    """Return what was measured here, and the speed-up by the requests at a time."""
    from cluster.worker.trial import try_here

    trial, num_drafts = try_here(config, arguments.task), arguments.draft_tokens
    draft_s = trial.costs.draft_s(1, num_drafts, with_models=trial.with_models) / num_drafts
    measured = Measured(
        base + trial.weights + trial.drafters + trial.kv_cache,
        trial.weights,
        trial.drafters,
        trial.kv_cache,
        float(trial.costs.steps.at([1])[0]),
        draft_s,
        trial.refused,
    )
    return measured, {n: trial.costs.speedup(n, with_models=trial.with_models) for n in REQUESTS}


def _draft_cost(config: Config, memory: MemoryPlan, task: str) -> float | None:
    """Return c by the weights that a token needs, of the slowest of a task's drafters; None = that
    of one is not known.  A look-up costs nothing."""
    read = {each.name: each.read for each in memory.models}
    costs = [0.0]
    for name in config.drafters_of(task):
        for part in config.drafters[name].stages or (name,):
            is_look_up = getattr(
                registry.drafter_class(config.drafters[part].kind), "is_look_up", False
            )
            if "" not in read or not (is_look_up or part in read):
                return None
            costs.append(read.get(part, 0) / read[""])
    return max(costs) if "" in read else None


def _splits(config: Config, memory: MemoryPlan, on: Gpus | None) -> Iterator[Split]:
    """Yield the ways to divide the target between GPUs that are named: ranks and, where the engine
    takes no number of them, a device map."""
    folder = folder_of(config.target.engine.model)
    if on is None or not on.memory or folder is None:
        return
    from cluster.engine.loading.inspection import describe
    from cluster.engine.loading.planned import planned

    (target,) = (each for each in memory.models if not each.name)

    def split(ranks: int, gpus: int) -> Split:
        device_map = "auto" if gpus > ranks else None
        engine = replace(config.target.engine, tensor_parallel=ranks, device_map=device_map)
        try:
            described = describe(folder, engine)
        except ConfigError as error:
            return Split(ranks, gpus, refused=error.message)
        sizes = planned(folder, described, engine, is_here=False)
        # Layers that are spread are read one after the other.
        step_s = sizes.rank_weights * target.read / target.weights / (on.bandwidth or math.inf)
        num_tokens = sizes.room(engine, on.memory, gpus // ranks)
        gpu_weights = sizes.rank_weights * ranks // gpus
        return Split(ranks, gpus, gpu_weights, num_tokens, step_s or None)

    counts = [2**power for power in range(on.count.bit_length())]
    found = [split(count, count) for count in counts]
    yield from found
    if all(each.refused for each in found[1:]):
        yield from (split(1, count) for count in counts[1:])


def _at_load(requests: int, curve: Speedup) -> AtLoad:
    best = {}
    for acceptance in ACCEPTANCES:
        length = step_profile.best_length(curve, acceptance)
        best[acceptance] = (length, curve(acceptance, length) if length else 1.0)
    return AtLoad(requests, step_profile.break_even(curve), best)
