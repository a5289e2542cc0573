"""The memory that each process of a configuration takes, by its models' files alone, and the GPUs
that it is planned for."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cluster.config.applications import drafter_deployment
from cluster.config.parse import check_known, check_that
from cluster.config.schema import Config, EngineConfig
from cluster.draft.options import HEAD_KINDS
from cluster.models.weights import stored_bytes
from cluster.records import frozen
from deployments.configured_models import engines
from deployments.placement import total_resources
from deployments.preflight import Inspected


@frozen
class Gpus:
    """GPUs of one kind.  memory: bytes of each; bandwidth: bytes/s of that; 0 = not known.  source:
    where both are from."""

    kind: str
    count: int
    memory: int = 0
    bandwidth: float = 0.0
    source: str = ""


def asked_gpus(config: Config, arguments: argparse.Namespace) -> Gpus | None:
    """Return the GPUs that the options name, None without any.

    Raises ConfigError for a kind that is not known, and where they are too few."""
    least = max(needed_gpus(config), 1)
    count = least if arguments.num_gpus is None else arguments.num_gpus
    if arguments.gpu is None:
        check_that(arguments.num_gpus is None, "--num-gpus", "of which kind? name it with --gpu")
        return None
    all_known, kind = known_gpus(), _plain(arguments.gpu)
    kind = next((each for each in all_known if _plain(each) == kind), kind)
    check_known(kind, all_known, "--gpu", f"{arguments.gpu!r} is not known", "kinds")
    check_that(
        config.target.engine.device != "cpu",
        "--gpu",
        "target.engine.device is cpu, which uses none; leave one out",
    )
    check_that(
        count >= least,
        "--num-gpus",
        f"{count} are too few, the configuration needs {least}; name more, or lower "
        "target.engine.tensor_parallel or the num_gpus of placements",
    )
    found = all_known[kind]
    memory, bandwidth = int(found["memory_gb"] * 1e9), float(found["gb_per_s"] * 1e9)
    return Gpus(kind, count, memory, bandwidth, f"{found['maker']}'s data sheet")


def planned_gpus(config: Config, arguments: argparse.Namespace) -> Gpus | None:
    """Return the GPUs of a plan: those that are asked for, else this machine's; of an unknown kind
    where there is none, and the configuration needs some; None = it is for this CPU."""
    import torch

    named = asked_gpus(config, arguments)
    if named is not None or config.target.engine.device == "cpu":
        return named
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        return Gpus(here.name, torch.cuda.device_count(), here.total_memory, 0.0, "measured here")
    needed = needed_gpus(config)
    return Gpus("", needed) if needed else None


def needed_gpus(config: Config) -> int:
    """Return the GPUs without which the configuration cannot be served as it stands."""
    engine = config.target.engine
    if engine.device == "cpu":
        return 0
    ranks = engine.tensor_parallel * config.target.replicas if engine.tensor_parallel > 1 else 0
    is_named = engine.device.startswith("cuda")
    return max(math.ceil(total_resources(config).get("GPU", 0.0)), ranks, int(is_named))


def gpus_of_rank(config: Config, drafter: str) -> int:
    """Return the GPUs of one rank of a drafter's engine, "" = the target's: those reserved for one
    whose layers a device map spreads, else one."""
    is_spread = not drafter and config.target.engine.device_map is not None
    return max(1, int(config.target.placement.num_gpus)) if is_spread else 1


def _plain(kind: str) -> str:
    """As people write it: "RTX 4090" and "rtx-4090" are one."""
    return "".join(filter(str.isalnum, kind.lower()))


@cache
def known_gpus() -> dict[str, dict[str, Any]]:
    """What makers state of their GPUs, by kind: memory and its bandwidth, as in data sheets."""
    return json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))


# The lengths of requests for which it is said how many of them fit.
LENGTHS = (1024, 4096, 16384)
TARGET_PROCESS = "target"


@frozen
class MemoryShare:
    """A part of one process's memory.

    process: target or drafter-NAME, of which there may be several.  what: base = Python with its
    libraries; weights; kv_cache, once all of it is in use; working = what steps take beside them.
    owner: path of the engine's key, "" = the process itself.
    """

    process: str
    owner: str
    what: str
    num_bytes: int


@frozen
class Sized:
    """One engine's model.  name: of its drafter, "" = the target's.  weights: of one rank on a GPU;
    read: those that a token needs.  memory: with its cache."""

    name: str
    path: str
    architecture: str
    num_parameters: int
    weights: int
    read: int
    memory: int


@frozen
class MemoryPlan:
    """unsized: the paths of models of which nothing is known here.  too_large: of those that leave
    no memory of their GPU for a KV cache.  num_tokens: of the target's KV cache, 0 = not known.
    requests: how many fit at a time, by their tokens."""

    parts: Sequence[MemoryShare]
    models: Sequence[Sized]
    unsized: Sequence[str]
    too_large: Sequence[str]
    num_tokens: int
    requests: Mapping[int, int]

    @property
    def total(self) -> int:
        """The bytes of one target process, on GPUs of one rank."""
        return sum(part.num_bytes for part in self.parts if part.process == TARGET_PROCESS)


def memory_plan(
    config: Config, found: Mapping[str, Inspected], base: int, gpus: Gpus | None
) -> MemoryPlan:
    """found: what the models are.  base: bytes of a process that has imported all it needs,
    0 = other memory than that of models.  gpus: those that the models run on, None = this CPU."""
    parts = [MemoryShare(TARGET_PROCESS, "", "base", base)] if base else []
    models: list[Sized] = []
    unsized, too_large = list[str](), list[str]()
    num_tokens, requests = 0, dict[int, int]()
    for each in engines(config):
        path, name, engine = each.path, each.drafter, each.settings
        if path not in found:
            unsized.append(path)
            continue
        process = TARGET_PROCESS if name in ("", *config.hosted) else drafter_deployment(name)
        on = None if engine.device == "cpu" else gpus
        sizes = found[path].sizes
        if on is None:
            weights, cache, states = sizes.weights, sizes.kv_cache, sizes.states
            working = sizes.steps
        else:
            taken = sum(part.num_bytes for part in parts if part.process == process)
            weights, states, working = sizes.rank_weights, 0, sizes.beside  # with the states
            cache = _on_gpu(engine, found[path], on, gpus_of_rank(config, name), taken)
            if on.memory and not cache:
                too_large.append(path)
        if not name:
            num_tokens = cache * (1 if on is None else engine.tensor_parallel) // sizes.kv_per_token
            longest, most = found[path].described.max_context_len, engine.max_running_sequences
            lengths = sorted({min(each, longest) for each in (*LENGTHS, longest)})
            requests = {each: min(num_tokens // each, most) for each in lengths}
        own = {"weights": weights, "kv_cache": cache, "states": states}
        memory = sum(own.values())
        if process not in {part.process for part in parts if part.what == "working"}:
            own["working"] = working
        if base and process != TARGET_PROCESS:
            parts.append(MemoryShare(process, "", "base", base))
        parts += [MemoryShare(process, path, what, size) for what, size in own.items() if size]
        architecture, read = found[path].described.architecture, int(weights * sizes.active)
        models.append(Sized(name, path, architecture, sizes.num_parameters, weights, read, memory))
    parts += _heads(config)
    return MemoryPlan(parts, models, unsized, too_large, num_tokens, requests)


def _on_gpu(engine: EngineConfig, found: Inspected, gpus: Gpus, num_gpus: int, taken: int) -> int:
    """Return the bytes of one rank's KV cache: as configured, or what its GPUs have left; 0 where
    that is nothing or not known.  num_gpus: of the rank.  taken: bytes of what its process has
    loaded before."""
    sizes, ranks = found.sizes, engine.tensor_parallel
    most = engine.max_running_sequences * found.described.max_context_len
    left = sizes.room(engine, max(gpus.memory - taken, 0), num_gpus)
    return (sizes.kv_cache or min(left, most) * sizes.kv_per_token) // ranks


def _heads(config: Config) -> Iterator[MemoryShare]:
    """Yield the weights of draft heads that are on this machine."""
    for name in config.hosted:
        drafter = config.drafters[name]
        model = str(drafter.options.get("model") or "")
        if drafter.kind in HEAD_KINDS and model and Path(model).is_dir():
            weights = stored_bytes(Path(model))
            yield MemoryShare(TARGET_PROCESS, f"drafters.{name}", "weights", weights)


# Rules of thumb for draft models, as warnings: none of them is a law, and a measurement stands
# above all.


# The target's parameters, as a multiple of a drafter's.
_SMALLER = (5, 20)
_LEAST_PARAMETERS = 50_000_000
_MEMORY_SHARE = 0.3
_FASTER = 5.0


@frozen
class Warned:
    """A rule that a drafter does not meet.  found: what is so instead.  source: of the rule."""

    drafter: str
    rule: str
    found: str
    source: str = "guides to speculative decoding in production"


def warnings(plan: MemoryPlan, draft_token_cost: float | None) -> list[Warned]:
    """Return the rules that draft models do not meet.

    draft_token_cost: the measured time of a draft token as a share of a step's; None = not
    measured, so bytes of weights stand for it."""
    return [
        Warned(drafter.name, rule, found)
        for target in plan.models
        if not target.name
        for drafter in plan.models
        if drafter.name
        for rule, found in _broken(target, drafter, plan.total, draft_token_cost)
    ]


def _broken(
    target: Sized, drafter: Sized, total_bytes: int, draft_token_cost: float | None
) -> Iterator[tuple[str, str]]:
    smaller = target.num_parameters / drafter.num_parameters
    if not _SMALLER[0] <= smaller <= _SMALLER[1]:
        yield "{} to {} times smaller than the target".format(*_SMALLER), f"{smaller:.3g}"
    if drafter.num_parameters < _LEAST_PARAMETERS:
        found = f"{drafter.num_parameters / 1e6:.3g} M"
        yield f"at least {_LEAST_PARAMETERS / 1e6:.0f} M parameters", found
    if drafter.memory > _MEMORY_SHARE * total_bytes:
        found = f"{drafter.memory / total_bytes:.0%}"
        yield f"at most {_MEMORY_SHARE:.0%} of the memory, its KV cache included", found
    cost = drafter.weights / target.weights if draft_token_cost is None else draft_token_cost
    if cost * _FASTER > 1.0:
        by = "by bytes of weights" if draft_token_cost is None else "measured"
        yield f"at least {_FASTER:g} times faster", f"{1 / cost:.2g} times ({by})"
    if drafter.architecture != target.architecture:
        found = f"{drafter.architecture} for {target.architecture}"
        yield "of the target's family", found
