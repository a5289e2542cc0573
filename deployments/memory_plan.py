"""The memory that each process of a configuration takes, by its models' files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.config.schema import Config, EngineConfig
from cluster.draft.head_options import HEAD_KINDS
from cluster.models.names import source_of
from cluster.models.published import published
from cluster.models.resolve import find
from deployments.configured_models import engines
from deployments.preflight import TARGET, Inspected

# The lengths of requests for which it is said how many of them fit.
LENGTHS = (1024, 4096, 16384)
TARGET_PROCESS = "target"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one process's memory.

    process: target or drafter-NAME, of which there may be several.  what: base = Python with its
    libraries; weights; kv_cache, once all of it is in use; working = what steps take beside them.
    owner: path of the engine's key, "" = the process itself.
    """

    process: str
    owner: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sized:
    """One engine's model.  name: of its drafter, "" = the target's.  memory: with its cache."""

    name: str
    path: str
    architecture: str
    num_parameters: int
    weights: int
    memory: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """unsized: the paths of models of which nothing is known here.  num_tokens: of the target's KV
    cache, 0 = not known.  requests: how many fit at a time, by their tokens."""

    parts: tuple[Part, ...]
    models: tuple[Sized, ...]
    unsized: tuple[str, ...]
    num_tokens: int
    requests: Mapping[int, int]

    @property
    def total(self) -> int:
        """The bytes of one target process."""
        return sum(part.num_bytes for part in self.parts if part.process == TARGET_PROCESS)


def memory_plan(config: Config, found: Mapping[str, Inspected], base: int) -> MemoryPlan:
    """found: what the models are.  base: bytes of a process that has imported all it needs,
    0 = other memory than that of models."""
    from cluster.engine.loading.held import held  # torch takes seconds to import

    parts = [Part(TARGET_PROCESS, "", "base", base)] if base else []
    models: list[Sized] = []
    unsized: list[str] = []
    for path, engine in engines(config).items():
        folder = find(source_of(engine.model)) or published(engine.model)
        if path not in found or folder is None:
            unsized.append(path)
            continue
        name = "" if path == TARGET else path.split(".")[1]
        process = TARGET_PROCESS if not name or name in config.hosted else f"drafter-{name}"
        sizes = held(folder, engine)
        own = [
            Part(process, path, "weights", sizes.weights),
            Part(process, path, "kv_cache", _kv_cache(engine, found[path])),
        ]
        if base and process != TARGET_PROCESS:
            parts.append(Part(process, "", "base", base))
        if process not in {part.process for part in parts if part.what == "working"}:
            own.append(Part(process, path, "working", sizes.working))
        parts += own
        memory = sum(part.num_bytes for part in own if part.what != "working")
        models.append(
            Sized(name, path, found[path].architecture, sizes.num_parameters, sizes.weights, memory)
        )
    parts += _heads(config)
    return MemoryPlan(tuple(parts), tuple(models), tuple(unsized), *_requests(config, found, parts))


def _requests(
    config: Config, found: Mapping[str, Inspected], parts: Sequence[Part]
) -> tuple[int, Mapping[int, int]]:
    """Return the tokens of the target's KV cache, and the requests that fit by their length."""
    if TARGET not in found:
        return 0, {}
    target = found[TARGET]
    cache = sum(each.num_bytes for each in parts if (each.owner, each.what) == (TARGET, "kv_cache"))
    num_tokens = cache // target.sizes.kv_per_token
    longest, most = target.max_context_len, config.target.engine.max_running_sequences
    lengths = sorted({min(each, longest) for each in (*LENGTHS, longest)})
    return num_tokens, {each: min(num_tokens // each, most) for each in lengths}


def _kv_cache(engine: EngineConfig, found: Inspected) -> int:
    """Return the bytes of its KV cache, on this machine's GPU as much as its memory allows."""
    import torch

    sizes = found.sizes
    if sizes.kv_cache or not torch.cuda.is_available():
        return sizes.kv_cache
    total = torch.cuda.get_device_properties(0).total_memory
    return sizes.room(engine, total) * sizes.kv_per_token


def _heads(config: Config) -> Iterator[Part]:
    """Yield the weights of draft heads that are on this machine."""
    for name in config.hosted:
        drafter = config.drafters[name]
        folder = Path(str(drafter.options.get("model", "")))
        if drafter.kind in HEAD_KINDS and drafter.options.get("model") and folder.is_dir():
            num_bytes = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
            yield Part(TARGET_PROCESS, f"drafters.{name}", "weights", num_bytes)
