"""One strict schema for everything an operator can set.  The defaults live here and nowhere else.

A configuration file is an ordinary Ray Serve config file; ours sits in `applications[0].args`,
with `http` taken from Serve's own `http_options`.  An unknown or
mistyped key stops start-up with its path and the nearest known key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device group: the target's, or a drafting LM's.

    model: a Hugging Face folder, a GGUF file, a hub model (owner/name[@revision]) or one of
    `drafthouse models`; see docs/models.md.
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
    generation_config: what requests that leave it open are sampled with: auto = what the
    checkpoint's generation_config.json says (temperature, top_p, top_k, min_p, repetition_penalty,
    max_new_tokens), none = OpenAI's defaults, or a folder that holds the file.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    generation_config: str = "auto"
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
    body_timeout_s: a body that has not arrived within so long is answered 408.
    max_sequences_per_request: upper bound of prompts times `n`; the line is for many clients.
    max_chars_per_token: text of more characters than this times the context's tokens is refused
    before it is tokenised; English has 4 to 5, deeply indented code up to 10.
    public_latency_classes: names of coordinator.latency_classes that requests may give; null =
    those that count at most 1, so that nobody goes before others unless the operator says so.
    max_choices: upper bound of `n`.  max_logprobs: of the alternatives reported per token.
    max_stop_strings: upper bound of stop strings per request.
    default_max_tokens: output tokens of a chat or gRPC request that names no limit; 0 = what the
    checkpoint says (target.generation_config), else the rest of the context.  Completions have
    OpenAI's 16.
    """

    replicas: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_sequences_per_request: int = 64
    max_chars_per_token: float = 16.0
    public_latency_classes: tuple[str, ...] | None = None
    max_choices: int = 16
    max_logprobs: int = 20
    max_stop_strings: int = 16
    default_max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The OpenAI-compatible endpoint: Ray Serve's `http_options`.

    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

    host: str = "127.0.0.1"
    port: int = 8000


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    """The gRPC endpoint.

    listener: ingress = every ingress replica, at host and port of its own node; serve = Ray Serve's
    proxies, on every node, all interfaces and the port of Serve's own `grpc_options`, which must
    name the servicer functions.
    host: the interface to listen on; 0.0.0.0 = all.  port: TCP port.
    """

    listener: Literal["ingress", "serve"] = "ingress"
    host: str = "127.0.0.1"
    port: int = 9000


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Where the parts listen for each other: coordinators, targets, drafters, and Ray itself where
    `drafthouse serve` starts it.  None of them but Ray asks who is calling.

    interface: loopback = 127.0.0.1, for one machine; node = the address by which Ray knows the
    node, for clusters, in a network that is closed to others.
    """

    interface: Literal["loopback", "node"] = "loopback"


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

    model_name: the name clients ask for; empty = the model's own: the last part of a folder, a
    GGUF file without its ending, the name of a hub model or of one of `drafthouse models`.
    drafters: the pool, by name.
    tasks: task class to the drafters that serve it, in order of preference; the task "default"
    serves requests without one and unknown ones, and where it is absent every drafter does.
    """

    model_name: str = ""
    target: TargetConfig = field(default_factory=TargetConfig)
    drafters: Mapping[str, DrafterConfig] = field(default_factory=dict)
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)

    @property
    def public_latency_classes(self) -> tuple[str, ...]:
        """The latency classes that requests may name."""
        allowed, weights = self.ingress.public_latency_classes, self.coordinator.latency_classes
        if allowed is not None:
            return allowed
        return tuple(name for name, weight in weights.items() if weight <= 1.0)

    def drafters_of(self, task: str) -> tuple[str, ...]:
        """Names of the drafters that serve `task`, best first."""
        if task in self.tasks:
            return self.tasks[task]
        return self.tasks.get("default", tuple(self.drafters))
