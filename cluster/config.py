"""One strict schema for everything an operator can set.  The defaults live here and nowhere else.

A configuration file is an ordinary Ray Serve config file; ours sits in `applications[0].args`,
with `http` and `grpc` taken from Serve's own `http_options` and `grpc_options`.  An unknown or
mistyped key stops start-up with its path and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from cluster.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device group: the target's, or a drafting LM's.

    model: a Hugging Face folder or hub name.
    dtype: of weights and KV; auto = the checkpoint's, on a CPU that can only emulate it float32.
    On a CPU bfloat16 is multiplied as such where the processor does that; sums are float32's.
    device: auto, cpu, cuda or cuda:N; auto = the first GPU, else the CPU.
    device_map: transformers' own, one-process targets only.
    quantization: keyword arguments of transformers' quantisation config, with `quant_method`.
    tensor_parallel: ranks that share the layers, each on a device of its own.
    page_size: tokens per page of the KV cache.  num_pages: pages, 0 = by memory_fraction.
    memory_fraction: share of the device's memory for weights and KV; on CPU, share of free memory
    for KV, capped by what max_running_sequences can use.
    max_running_sequences: sequences that may hold KV at the same time.
    max_context_len: prompt and output together, in tokens; 0 = the model's own limit.
    max_batch_tokens: rows of one forward; longer prefills are cut into chunks.
    prefix_cache: keep the KV of finished requests for prompts that begin alike.
    threads: of one process on a CPU, 0 = all cores where our kernels run, else half, at least one.
    attention: name of the attention implementation, auto = the best for the device.
    reproducible: the same bits of text with speculation on, off, in another batch, on another
    replica of the same processor type; on a CPU with a C++ compiler.
    compile: compile the forward at load, on a CPU with a C++ compiler: a minute at first, seconds
    from torch's cache; steps of small and medium models get faster.
    cuda_graphs: replay steps of up to 256 rows as CUDA graphs, captured at load, where the whole
    model is on one NVIDIA GPU and its code allows that.
    trust_remote_code: let transformers run code that comes with the checkpoint.
    """

    model: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    quantization: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    page_size: int = 16
    num_pages: int = 0
    memory_fraction: float = 0.85
    max_running_sequences: int = 64
    max_context_len: int = 0
    max_batch_tokens: int = 512
    prefix_cache: bool = True
    threads: int = 0
    attention: str = "auto"
    reproducible: bool = False
    compile: bool = False
    cuda_graphs: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Where the replicas of one deployment run.

    num_cpus, num_gpus: per replica, or per rank for a target.  resources: custom Ray resources
    per replica or rank.  labels: Ray node labels the node must carry, key to value.
    """

    num_cpus: float = 0.5
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model whose text is served.

    replicas: copies of the whole model; each has its own ranks.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter of the pool.

    kind: a name in the drafter registry (`cluster/draft/registry.py`), or module:Class.
    options: that kind's own settings, checked against its options class.
    max_nodes: bound of the growing tree per request.
    max_requests: requests a replica keeps state for; the least recent ones go first.
    replicas: how many workers share the requests.
    nice: how far its processes stand back behind others on the same cores, 0 to 19: a drafter that
    shares the target's cores should draft in the time that is left over.
    """

    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    max_nodes: int = 128
    max_requests: int = 256
    replicas: int = 1
    nice: int = 0
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The round loop.

    replicas: coordinators.  One leads all targets; more are refused, as each would lead them all.
    max_running_sequences: requests decoded at the same time; the others wait.
    max_queued_requests: requests that may wait; more are answered 429.
    max_draft_tokens: upper bound of draft nodes per sequence and step.
    budget: adaptive = as many nodes as the measured step times and acceptance say pay;
    fixed = always max_draft_tokens.
    max_draft_wait_ms: longest wait of a step for drafts that are about to arrive, 0 = none.
    max_slowdown: share of plain decoding's time that speculation may cost when drafts fail.
    slowdown_slack: plain steps' time it may lose beyond that before it must have earned it; n
    sequences at a time may lose it divided by the root of n.
    latency_classes: what a request's speed counts for when a step's draft nodes are shared out,
    0.01 to 100, by the name that it gives in `speculation.latency_class`; 1 if it gives none.
    max_homogeneity_wait_ms: how long a ready group of one task may wait for its like.
    cohorts: two = while one half of a target's sequences is verified the other half's batch is
    planned and queued; one = all of them in one batch; auto = as its measured step times say pays.
    max_frame_bytes: refuse larger gRPC frames.
    breaker_failures, breaker_reset_s: a drafter that failed so often in a row rests for so long.
    target_silence_s: a target that owes answers and says nothing at all for so long is left, and an
    item of which it says nothing is sent again; one that computes says so every second.
    target_timeout_s: a target that says it computes, and ends no step for so long, is left; so long
    do requests wait where there is no target.
    """

    replicas: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_running_sequences: int = 64
    max_queued_requests: int = 256
    max_draft_tokens: int = 16
    budget: Literal["adaptive", "fixed"] = "adaptive"
    max_draft_wait_ms: float = 16.0
    max_slowdown: float = 0.02
    slowdown_slack: float = 8.0
    latency_classes: Mapping[str, float] = field(
        default_factory=lambda: {"throughput": 1.0, "interactive": 4.0}
    )
    max_homogeneity_wait_ms: float = 2.0
    cohorts: Literal["auto", "one", "two"] = "auto"
    max_frame_bytes: int = 4 * 1024 * 1024
    breaker_failures: int = 3
    breaker_reset_s: float = 2.0
    target_silence_s: float = 6.0
    target_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """The front door's limits.

    replicas: ingress processes; each tokenises and detokenises on one core.
    max_body_bytes: larger request bodies are answered 413.
    max_choices: upper bound of `n`.  max_logprobs: of the alternatives reported per token.
    max_stop_strings: upper bound of stop strings per request.
    default_max_tokens: output tokens of a request that names no limit.
    """

    replicas: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_body_bytes: int = 4 * 1024 * 1024
    max_choices: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    default_max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible endpoint: Ray Serve's `http_options`.

    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC endpoint: Ray Serve's `grpc_options`.

    port: TCP port, on all interfaces.
    """

    port: int = 9000


@dataclass(frozen=True, slots=True)
class DashboardConfig:
    """Ray's dashboard, where `drafthouse serve` starts Ray itself.

    host: the interface to listen on.  port: TCP port.  enabled: false starts no dashboard.
    """

    host: str = "127.0.0.1"
    port: int = 8265
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Config:
    """The whole of it.

    model_name: the name clients ask for.
    drafters: the pool, by name.
    tasks: task class to the drafters that serve it, in order of preference; the task "default"
    serves requests without one and unknown ones, and where it is absent every drafter does.
    """

    model_name: str = "drafthouse"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafters: Mapping[str, DrafterConfig] = field(default_factory=dict)
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)

    def drafters_of(self, task: str) -> tuple[str, ...]:
        """Names of the drafters that serve `task`, best first."""
        if task in self.tasks:
            return self.tasks[task]
        return self.tasks.get("default", tuple(self.drafters))


def parse(kind: type[T], value: Any, path: str = "") -> T:
    """Build the dataclass `kind` from plain YAML data; every deviation is a ConfigError.

    path: where `value` stands in the file, for messages.
    """
    return typing.cast(T, _parse(kind, value, path))


def _parse(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type[Any], kind), value, path)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, value, path)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(str(choice) for choice in arguments)
            raise ConfigError(f"{path}: {value!r} is none of: {choices}", param=path)
        return value
    if origin is not None and issubclass(origin, Mapping):
        if value is None:  # a key whose block was left empty
            return {}
        if not isinstance(value, Mapping):
            raise _mismatch("a mapping", value, path)
        return {
            str(key): _parse(arguments[1], item, f"{path}.{key}") for key, item in value.items()
        }
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _mismatch("a list", value, path)
        return tuple(_parse(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    return _parse_scalar(kind, value, path)


def _parse_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:  # bool is an int to isinstance, but not to an operator
        names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
        raise _mismatch(names.get(kind, str(kind)), value, path)
    return value


def _parse_union(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    kinds = [argument for argument in arguments if argument is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"{path}: the schema may only use `X | None` unions")
    return _parse(kinds[0], value, path)


def _parse_dataclass(kind: type[Any], value: Any, path: str) -> Any:
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise _mismatch("a mapping", value, path)
    hints = typing.get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    for key in value:
        if key not in known:
            raise unknown_key(str(key), known, f"{path}.{key}" if path else str(key))
    prefix = f"{path}." if path else ""
    return kind(**{key: _parse(hints[key], item, f"{prefix}{key}") for key, item in value.items()})


def unknown_key(key: str, known: Sequence[str], path: str) -> ConfigError:
    """The error for a key that is not in the schema, with the nearest one that is."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return ConfigError(f"{path}: unknown key ({hint})", param=path)


def _mismatch(expected: str, value: Any, path: str) -> ConfigError:
    return ConfigError(f"{path}: {value!r} is not {expected}", param=path)
