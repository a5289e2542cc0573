"""`drafthouse plan`: the memory that a configuration takes, and what its drafts should bring."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.spec import speedup
from cluster.spec.speedup import Speedup
from deployments.memory_plan import MemoryPlan, memory_plan
from deployments.plan import size
from deployments.preflight import Inspected
from deployments.rules_of_thumb import Warned, warnings

REQUESTS = (1, 4, 16, 64)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_WHAT = {
    "base": "Python with torch and transformers",
    "weights": "weights",
    "kv_cache": "KV cache, all of it in use",
    "working": "what steps take beside them",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What --measure has found of one target process, in bytes; see `cluster.worker.trial`."""

    total: int
    weights: int
    drafters: int
    kv_cache: int
    step_s: float
    draft_token_s: float
    refused: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Expected:
    """The speed-up of drafts of `draft_tokens` tokens, of one request at a time.

    acceptance: conditional.  accepted_share: accepted / drafted, as servers report it.  cost:
    Leviathan's c.  measured: None = not measured."""

    acceptance: float
    draft_tokens: int
    accepted_share: float
    guide: float
    leviathan: float
    cost: float
    measured: float | None


@dataclass(frozen=True, slots=True)
class AtLoad:
    """The drafts that pay for so many requests at a time.

    break_even: the least acceptance from which some do, None = none do.  best: by acceptance, the
    draft tokens (0 = none) and the speed-up."""

    requests: int
    break_even: float | None
    best: Mapping[float, tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The whole plan, as --json prints it.  loads: by the measured curve, and without one by
    Leviathan's formula, which is the same for any number of requests."""

    model: str
    memory: MemoryPlan
    total_bytes: int
    measured: Measured | None
    speedup: Expected
    loads: Sequence[AtLoad]
    warnings: Sequence[Warned]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb, beside FILE and --set."""
    add = parser.add_argument
    add("--measure", action="store_true", help="load the models here, and measure steps and memory")
    add("--acceptance", type=float, default=0.8, metavar="A",
        help="of a draft token, where all before it were accepted (%(default)s)")  # fmt: skip
    add("--draft-tokens", type=int, default=4, metavar="K", help="of one step (%(default)s)")
    add("--task", default="default", help="whose drafters are timed (%(default)s)")
    add("--json", action="store_true", help="print JSON")


def plan_text(config: Config, found: Mapping[str, Inspected], arguments: argparse.Namespace) -> str:
    """Return what the command prints.  found: what the models on this machine are.

    Raises ConfigError for numbers that make no sense, and where --measure cannot load a model."""
    if not 0.0 <= arguments.acceptance <= 1.0 or arguments.draft_tokens < 1:
        raise ConfigError("--acceptance is a number from 0 to 1, --draft-tokens 1 or more")
    if arguments.task not in (known := {"default", *config.tasks}):
        raise ConfigError(f"--task: no class {arguments.task!r} ({', '.join(sorted(known))})")
    planned = _forecast(config, found, arguments)
    if arguments.json:
        return json.dumps(asdict(planned), indent=2) + "\n"
    return "\n".join(_lines(planned)) + "\n"


def _forecast(
    config: Config, found: Mapping[str, Inspected], arguments: argparse.Namespace
) -> Forecast:
    # This process imports what a target's does, so that it takes as much.
    import deployments.target  # noqa: F401
    from cluster.engine.device import resolve_device
    from cluster.worker.trial import resident_bytes, try_here

    # A GPU's memory is another than that of the process.
    is_on_cpu = resolve_device(config.target.engine.device).type == "cpu"
    base = resident_bytes() if is_on_cpu else 0
    memory = memory_plan(config, found, base)
    acceptance, num_drafts = arguments.acceptance, arguments.draft_tokens
    models = [each for each in memory.models if each.name]
    target = next((each for each in memory.models if not each.name), None)
    cost = models[0].weights / target.weights if models and target else 0.0
    measured, curves = None, dict[int, Speedup]()
    if arguments.measure:
        trial = try_here(config, arguments.task)
        draft_s = trial.costs.draft_s(1, num_drafts, with_models=trial.with_models) / num_drafts
        step_s = float(trial.costs.steps.at([1])[0])
        cost = draft_s / step_s
        measured = Measured(
            base + trial.weights + trial.drafters + trial.kv_cache,
            trial.weights, trial.drafters, trial.kv_cache, step_s, draft_s, trial.refused,
        )  # fmt: skip
        curves = {n: trial.costs.speedup(n, with_models=trial.with_models) for n in REQUESTS}
    by_leviathan = functools.partial(speedup.by_leviathan, cost=cost)
    expected = Expected(
        acceptance, num_drafts, speedup.accepted_share(acceptance, num_drafts),
        speedup.by_guide(acceptance, num_drafts), by_leviathan(acceptance, num_drafts), cost,
        curves[1](acceptance, num_drafts) if curves else None,
    )  # fmt: skip
    loads = [_at_load(count, curve) for count, curve in (curves or {1: by_leviathan}).items()]
    broken = warnings(memory.models, memory.total, cost if measured else None)
    return Forecast(config.model_name, memory, memory.total, measured, expected, loads, broken)


def _at_load(requests: int, curve: Speedup) -> AtLoad:
    best = {}
    for acceptance in ACCEPTANCES:
        length = speedup.best_length(curve, acceptance)
        best[acceptance] = (length, curve(acceptance, length) if length else 1.0)
    return AtLoad(requests, speedup.break_even(curve), best)


def _lines(planned: Forecast) -> Iterator[str]:
    memory, measured = planned.memory, planned.measured
    yield f"model {planned.model}"
    yield ""
    yield f"{'process':<16} {'of':<32} {'memory':>10}"
    for part in memory.parts:
        place = f"{part.process:<16} {part.owner or '-':<32}"
        yield f"{place} {size(part.num_bytes):>10}  {_WHAT[part.what]}"
    yield f"one target process in all: {size(planned.total_bytes)}"
    if measured is not None:
        yield (
            f"measured here: {size(measured.total)} (weights {size(measured.weights)}, drafters "
            f"and what steps leave {size(measured.drafters)}, the rest of the KV caches "
            f"{size(measured.kv_cache)})"
        )
    for path in memory.unsized:
        yield f"{path}: nothing is known here of its size; `drafthouse fetch` its model"
    for name, why in (measured.refused if measured else {}).items():
        yield f"drafter {name} cannot draft: {why}"
    if memory.requests:
        fits = ", ".join(f"{count} of {length:,}" for length, count in memory.requests.items())
        yield f"the KV cache has {memory.num_tokens:,} tokens; requests that fit, by tokens: {fits}"
    yield ""
    yield from _speedup_lines(planned)
    yield ""
    for each in planned.warnings:
        yield f"warning: drafter {each.drafter}: {each.rule}; it is {each.found} ({each.source})"


def _speedup_lines(planned: Forecast) -> Iterator[str]:
    expected, is_measured = planned.speedup, planned.measured is not None
    yield (
        f"speed-up of one request by k = {expected.draft_tokens} draft tokens, each accepted with "
        f"a = {expected.acceptance:g} where those before it were:"
    )
    by = "measured" if is_measured else "by bytes of weights"
    rows = {
        "a guide's (k + 1 - a) / (k (1 - a) + 1)": f"{expected.guide:.2f}",
        f"Leviathan's (1 - a^(k+1)) / ((1 - a) (c k + 1)), c = {expected.cost:.3f} {by}":
            f"{expected.leviathan:.2f}",
        "the measured curve":
            "see --measure" if expected.measured is None else f"{expected.measured:.2f}",
    }  # fmt: skip
    yield from (f"  {name:<78} {value}" for name, value in rows.items())
    yield (
        f"accepted / drafted, which servers report, is not a: here it would read "
        f"{expected.accepted_share:.2f}"
    )
    yield ""
    yield "by the measured curve" if is_measured else "by Leviathan's formula, at any load"
    columns = "".join(f"{f'a = {each:g}':>12}" for each in ACCEPTANCES)
    yield f"{'requests':>8} {'pays from a':>12}{columns}   (best k: its speed-up)"
    for load in planned.loads:
        cells = "".join(
            f"{f'{length}: {ratio:.2f}' if length else 'none':>12}"
            for length, ratio in load.best.values()
        )
        least = "never" if load.break_even is None else f"{load.break_even:.2f}"
        yield f"{load.requests if is_measured else 'any':>8} {least:>12}{cells}"
