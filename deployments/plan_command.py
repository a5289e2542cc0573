"""`drafthouse plan`: the memory that a configuration takes, and what its drafts should bring."""

from __future__ import annotations

import argparse
import functools
import json
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
from deployments.plan import size
from deployments.preflight import TARGET, Inspected, inspect

REQUESTS = (1, 4, 16, 64)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_WHAT = {
    "base": "Python with torch and transformers: measured here",
    "weights": "weights: by the files, or by the configuration where there are none",
    "kv_cache": "KV cache, all of it in use: by the configuration and the memory",
    "working": "what steps take beside them: an allowance",
}


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
    """The target on so many ranks.  num_tokens: of the KV cache, 0 = it does not fit.  step_s: in
    which a rank's weights are read, None = not known."""

    ranks: int
    rank_weights: int
    num_tokens: int
    step_s: float | None


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
    planned = _forecast(config, inspect(config, is_here=is_here, is_plan=True), arguments, on)
    if arguments.json:
        return json.dumps(asdict(planned), indent=2) + "\n"
    return "\n".join(_lines(planned)) + "\n"


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
    """Yield the ways to divide the target between GPUs that are named."""
    folder = folder_of(config.target.engine.model)
    if on is None or not on.memory or folder is None:
        return
    from cluster.engine.loading.inspection import describe
    from cluster.engine.loading.planned import planned

    (target,) = (each for each in memory.models if not each.name)
    for ranks in (2**power for power in range(on.count.bit_length())):
        engine = replace(config.target.engine, tensor_parallel=ranks)
        try:
            described = describe(str(folder), engine)
        except ConfigError:
            continue  # its heads cannot be divided so
        sizes = planned(folder, described, engine, is_here=False)
        read = sizes.rank_weights * target.read / target.weights
        yield Split(
            ranks,
            sizes.rank_weights,
            sizes.room(engine, on.memory),
            read / on.bandwidth if on.bandwidth else None,
        )


def _at_load(requests: int, curve: Speedup) -> AtLoad:
    best = {}
    for acceptance in ACCEPTANCES:
        length = step_profile.best_length(curve, acceptance)
        best[acceptance] = (length, curve(acceptance, length) if length else 1.0)
    return AtLoad(requests, step_profile.break_even(curve), best)


def _lines(planned: Forecast) -> Iterator[str]:
    memory, measured, on = planned.memory, planned.measured, planned.gpus
    yield f"model {planned.model}"
    yield from _gpu_lines(planned)
    yield ""
    yield f"{'process':<16} {'of':<32} {'memory':>10}"
    for part in memory.parts:
        place = f"{part.process:<16} {part.owner or '-':<32}"
        yield f"{place} {size(part.num_bytes):>10}  {_WHAT[part.what]}"
    if planned.total_bytes is not None:
        of = "one target process" if on is None else "one rank of the target"
        yield f"{of} in all: {size(planned.total_bytes)}"
        if planned.free_bytes is not None and planned.total_bytes > planned.free_bytes:
            yield f"DOES NOT FIT: {size(planned.free_bytes)} are free on this machine"
    if measured is not None:
        yield (
            f"measured here: {size(measured.total)} (weights {size(measured.weights)}, drafters "
            f"and what steps leave {size(measured.drafters)}, the rest of the KV caches "
            f"{size(measured.kv_cache)})"
        )
    for path in memory.unsized:
        yield (
            f"{path}: nothing is known here of its size; `drafthouse fetch` its model, or name a "
            "folder with its config.json"
        )
    for path in memory.too_large:
        yield (
            f"{path}: DOES NOT FIT: its weights and what steps take leave no memory of a GPU for a "
            "KV cache; see its memory_fraction, or divide it between more GPUs (-tp)"
        )
    for name, why in (measured.refused if measured else {}).items():
        yield f"drafter {name} cannot draft: {why}"
    if memory.num_tokens:
        fits = ", ".join(f"{count} of {length:,}" for length, count in memory.requests.items())
        yield f"the KV cache has {memory.num_tokens:,} tokens; requests that fit, by tokens: {fits}"
    yield ""
    yield from _speedup_lines(planned)
    yield ""
    for each in planned.warnings:
        yield f"warning: drafter {each.drafter}: {each.rule}; it is {each.found} ({each.source})"


def _gpu_lines(planned: Forecast) -> Iterator[str]:
    on = planned.gpus
    if on is None:
        yield "for the CPU of this machine"
        return
    if not on.memory:
        yield (
            f"for {on.count} GPUs of a kind that is not named, so the KV cache is not known; "
            "--gpu names one"
        )
        return
    speed = f" and {on.bandwidth / 1e9:,.0f} GB/s" * bool(on.bandwidth)
    yield f"for {on.count} x {on.kind}, {on.memory / 1e9:,.0f} GB{speed} each ({on.source})"
    yield ""
    yield f"{'ranks (-tp)':>11} {'weights of each':>16} {'tokens of KV':>13}  a plain step"
    for each in planned.splits:
        tokens = f"{each.num_tokens:,}" if each.num_tokens else "does not fit"
        step = "not known" if each.step_s is None else f"{1000 * each.step_s:.1f} ms or more"
        yield f"{each.ranks:>11} {size(each.rank_weights):>16} {tokens:>13}  {step}"
    if on.bandwidth:
        yield "assumed: a step takes at least as long as its weights are read at that bandwidth"


def _speedup_lines(planned: Forecast) -> Iterator[str]:
    expected, is_measured = planned.speedup, planned.measured is not None
    yield (
        f"speed-up of one request by k = {expected.draft_tokens} draft tokens, assumed that each "
        f"is accepted with a = {expected.acceptance:g} where those before it were:"
    )
    by = "measured here" if is_measured else "by bytes of weights, look-ups for nothing"
    cost = "c not known" if expected.cost is None else f"c = {expected.cost:.3f} {by}"
    rows = {
        "a guide's (k + 1 - a) / (k (1 - a) + 1)": expected.guide,
        f"Leviathan's (1 - a^(k+1)) / ((1 - a) (c k + 1)), {cost}": expected.leviathan,
        "the measured curve": expected.measured,
    }
    for name, value in rows.items():
        yield f"  {name:<100} {'see --measure' if value is None else f'{value:.2f}'}"
    yield (
        f"accepted / drafted, which servers report, is not a: here it would read "
        f"{expected.accepted_share:.2f}"
    )
    if not planned.loads:
        return
    yield ""
    yield (
        "by the measured curve"
        if is_measured
        else "by Leviathan's formula, assumed that a step with drafts takes as long as a plain one"
    )
    columns = "".join(f"{f'a = {each:g}':>12}" for each in ACCEPTANCES)
    yield f"{'requests':>8} {'pays from a':>12}{columns}   (best k: its speed-up)"
    for load in planned.loads:
        cells = "".join(
            f"{f'{length}: {ratio:.2f}' if length else 'none':>12}"
            for length, ratio in load.best.values()
        )
        least = "never" if load.break_even is None else f"{load.break_even:.2f}"
        yield f"{load.requests if is_measured else 'any':>8} {least:>12}{cells}"
