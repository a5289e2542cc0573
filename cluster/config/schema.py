"""One strict schema for everything an operator can set.  The defaults live here and nowhere else.

A configuration file is an ordinary Ray Serve config file; ours sits in `applications[0].args`.  An
unknown or mistyped key stops start-up with its path and the nearest known key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from cluster.config.answers import AnswersConfig
from cluster.config.api import ApiConfig, GrpcConfig, HttpConfig


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device group: the target's model, or a drafter's.

    model: a Hugging Face folder, a GGUF file, a hub model (owner/name[@revision]) or one of
    `drafthouse models`; see docs/models.md.
    dtype: number format of weights and KV cache. auto = the checkpoint's format, or float32 where
    the CPU would have to emulate that format.  A CPU that multiplies bfloat16 sums the products in
    float32.
    device: auto, cpu, cuda or cuda:N. auto = the first GPU if there is one, else the CPU; an NVIDIA
    GPU that torch does not see is an error.
    device_map: transformers' own `device_map`; it spreads one process over several devices.  Not
    together with tensor_parallel.
    quantization: keyword arguments of transformers' quantisation config, `quant_method` among them.
    tensor_parallel: ranks (processes) that share the layers; each needs a device of its own.
    page_size: tokens per page of the KV cache.
    num_pages: memory of the KV cache, in pages of all layers; 0 = as much as memory_fraction
    allows.  Layers with a sliding window and layers without one divide it.
    memory_fraction: on a GPU, the share of its memory that may be in use once the KV cache is
    there, what other processes use included; null = 0.85. On a CPU, the share of free memory for
    the KV cache, at most a quarter; null = 2 GiB, and at most a quarter. The KV cache is never
    larger than max_running_sequences can use, and on a CPU its pages take memory once they are
    used.
    max_running_sequences: sequences that may hold KV pages at the same time.
    max_context_len: prompt and output together, in tokens; 0 = the model's own limit.
    max_batch_tokens: rows of one forward pass; a longer prefill is cut into chunks.
    prefix_cache: keep the KV pages of finished requests for prompts that begin with the same
    tokens.
    threads: CPU threads of one process. 0 = all cores if our own kernels run, else half of them.
    attention: the attention implementation (sdpa, native or triton); auto = the best one for the
    device.
    reproducible: give the same text to the last bit with speculation on or off, in any batch, and
    on every replica with the same type of processor.  Only on a CPU with a C++ compiler.
    compile: compile the forward pass with torch at load.  Steps of small and medium models get
    faster.  The first load takes a minute longer, later ones some seconds.  Only on a CPU with a
    C++ compiler.
    cuda_graphs: capture CUDA graphs at load and replay them in steps of up to 256 rows.  Only where
    the whole model is on one NVIDIA GPU and its code allows that.
    trust_remote_code: let transformers run Python code that comes with the checkpoint.
    adapters: LoRA adapters of the target, name to folder as peft saves it.  A request chooses one
    by its name in `model`.  Not together with tensor_parallel or reproducible.
    max_adapter_rank: the largest rank that an adapter may have.
    """

    model: str = ""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    quantization: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    page_size: int = 16
    num_pages: int = 0
    memory_fraction: float | None = None
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
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapter_rank: int = 64


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Where the replicas of one deployment run.

    num_cpus, num_gpus: reserved per replica; for a target, per rank.
    resources: custom Ray resources, reserved per replica or rank.
    labels: Ray node labels that the node must have, key to value.
    cores: CPU cores, by number, that each of these processes is pinned to; empty = not pinned.
    """

    num_cpus: float = 0.5
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterPlacement(PlacementConfig):
    """Where one drafter runs: inside the target, or in processes of its own.

    with: target = inside every target, on its devices and by turns with its steps.
    num_cpus, num_gpus, resources, labels, cores: as for other processes; only without `with`.
    """

    host: Literal["", "target"] = field(default="", metadata={"key": "with"})


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model whose text is served.

    replicas: copies of the whole model; each has its own ranks.
    generation_config: sampling defaults of requests that do not set a value. auto = the
    checkpoint's generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty,
    max_new_tokens); none = OpenAI's defaults; or a folder that has such a file.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    generation_config: str = "auto"
    placement: PlacementConfig = field(default_factory=PlacementConfig)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """One drafter: of the pool, or resident in the target (`Config.residents`).

    kind: a kind of drafter that is listed below, or `module:Class` for one of your own; see
    docs/drafters.md.
    options: settings of that kind.
    max_nodes: upper bound of the tree that grows for a request.
    max_requests: requests that one replica holds at the same time; it declines further ones.
    replicas: workers that share the requests.
    nice: 0 to 19, as in Unix: a drafter with a higher value gets less of a core that others want.
    shadow: its trees are scored by the texts that follow, and never verified.
    placement: auto = inside the target, unless it has what only processes of its own have:
    replicas, nice, or an engine on another device than the target's.
    """

    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    max_nodes: int = 128
    max_requests: int = 256
    replicas: int = 1
    nice: int = 0
    shadow: bool = False
    placement: Literal["auto"] | DrafterPlacement = "auto"

    @property
    def reserved(self) -> PlacementConfig:
        """What a process of its own reserves, where it has one."""
        return PlacementConfig() if isinstance(self.placement, str) else self.placement

    @property
    def device(self) -> str:
        """The device that its engine names; auto where it names none, or has no engine."""
        engine = self.options.get("engine")
        return str(engine.get("device", "auto")) if isinstance(engine, Mapping) else "auto"


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The process that opens texts at the targets and asks the pool's drafters.

    replicas: number of coordinators.  One leads all targets; more than one is refused.
    max_running_sequences: requests that are decoded at the same time; the others wait in the queue.
    max_queued_requests: length of the queue; further requests are answered 429.
    max_draft_tokens: draft tokens that one step may verify per sequence.
    budget: adaptive = verify as many draft tokens as pay, judged by measured step times and
    acceptance; fixed = always max_draft_tokens.
    max_slowdown: share of plain decoding's time that speculation may cost while drafts are
    rejected.
    slowdown_slack: what speculation may cost beyond max_slowdown before it has saved anything, in
    plain steps.  With n sequences running, it is divided by the square root of n.
    latency_classes: named weights of requests, 0.01 to 100.  When draft tokens are shared out, the
    time saved for a request counts this much.  A request names its class in
    `speculation.latency_class`; without one it counts 1.
    keep_learned: keep what the control loop has learned (step times, scores of drafters) in the
    cache of models, and begin with it at the next start of the same models on the same machine.
    max_frame_bytes: larger gRPC messages between the parts are refused.
    breaker_failures: a drafter that fails so often in a row is left alone.
    breaker_reset_s: how long it is left alone.
    target_silence_s: a target with work that says nothing for so long is given up, and its requests
    move to another.  A target that computes says so every second.
    target_timeout_s: a target that says it computes, but ends no step for so long, is given up.
    Requests wait as long for a target when there is none.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {
        "max_draft_wait_ms": "a target's steps wait for no drafter, so remove it",
        "max_homogeneity_wait_ms": "no text waits for others of its kind, so remove it",
        "cohorts": "a target goes from step to step by itself, so remove it",
    }

    replicas: int = 1
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    max_running_sequences: int = 64
    max_queued_requests: int = 256
    max_draft_tokens: int = 16
    budget: Literal["adaptive", "fixed"] = "adaptive"
    max_slowdown: float = 0.02
    slowdown_slack: float = 8.0
    latency_classes: Mapping[str, float] = field(
        default_factory=lambda: {"throughput": 1.0, "interactive": 4.0}
    )
    keep_learned: bool = True
    max_frame_bytes: int = 4 * 1024 * 1024
    breaker_failures: int = 3
    breaker_reset_s: float = 2.0
    target_silence_s: float = 6.0
    target_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """The HTTP and gRPC front end, and its limits.

    replicas: ingress processes; each uses one core to tokenise and detokenise.
    max_body_bytes: larger request bodies are answered 413.
    body_timeout_s: a body that has not arrived within this time is answered 408.
    max_sequences_per_request: upper bound of prompts times `n`, so that no request fills the queue.
    max_chars_per_token: a prompt with more characters than this times the context length in tokens
    is refused before it is tokenised.  English text has 4 to 5, deeply indented code up to 10.
    public_latency_classes: the coordinator.latency_classes that requests may name. null = those
    that count at most 1, so that no client can go before others.
    max_choices: upper bound of `n`.
    max_logprobs: upper bound of `logprobs` and `top_logprobs`.
    max_stop_strings: upper bound of stop strings per request.
    default_max_tokens: output tokens of a chat or gRPC request that sets no limit. 0 = the
    checkpoint's limit (target.generation_config), else the rest of the context.  Completions have
    OpenAI's default, 16.
    log_requests: write a line for every request that ends: its id, tokens and times, no content.
    shutdown_grace_s: when the server stops, it takes no new request, and answers that are under way
    have so long to end; those that are not over then end with an error.
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
    log_requests: bool = True
    shutdown_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """How the parts reach each other: coordinators, targets, drafters, and Ray where `drafthouse
    serve` starts it.  Ray asks for a token; the others ask nobody who is calling.

    interface: loopback = 127.0.0.1, for one machine. node = the node's address as Ray knows it, for
    clusters; the network between the nodes must be closed to others.
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
    """The keys beside the sections.

    model_name: the name that clients ask for.  Empty = the model's own: a folder's last part, a
    GGUF file's name without its ending, or the name on the hub or in `drafthouse models`.
    drafters: by name.
    tasks: for each task class, the drafters that serve it, best first.  The class `default` is for
    requests that name no class or an unknown one; without it, such requests have every drafter.
    """

    model_name: str = ""
    target: TargetConfig = field(default_factory=TargetConfig)
    drafters: Mapping[str, DrafterConfig] = field(default_factory=dict)
    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    ingress: IngressConfig = field(default_factory=IngressConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
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

    @property
    def residents(self) -> tuple[str, ...]:
        """Names of the drafters that run inside the target."""
        return tuple(filter(self._is_resident, self.drafters))

    @property
    def pool(self) -> tuple[str, ...]:
        """Names of the drafters that run in processes of their own."""
        return tuple(name for name in self.drafters if not self._is_resident(name))

    def _is_resident(self, name: str) -> bool:
        drafter = self.drafters[name]
        if not isinstance(drafter.placement, str):
            return drafter.placement.host == "target"
        has_own = drafter.replicas > 1 or drafter.nice > 0
        return not has_own and drafter.device in ("auto", self.target.engine.device)

    def drafters_of(self, task: str) -> tuple[str, ...]:
        """Names of the drafters that serve `task`, best first."""
        if task in self.tasks:
            return self.tasks[task]
        return self.tasks.get("default", tuple(self.drafters))
