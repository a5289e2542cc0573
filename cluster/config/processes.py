"""The sections of the processes that draft, verify and lead, and where they run.

`cluster.config.schema` has all the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from cluster.config.parse import (
    MAX_SECONDS,
    Name,
    Nice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Range,
    Seconds,
    Share,
    check_that,
)
from cluster.config.speculation import (
    AuditConfig,
    DraftLengthConfig,
    RolloutConfig,
    SwitchbackConfig,
)
from cluster.records import frozen
from cluster.requests.fields import REMOVED_LAWS, Law

# The kind whose options name other drafters, and the one whose engine is another server.
CASCADE = "cascade"
# The kind that drafts nothing: it reads what others' drafts came to.
RECORDER = "recorder"


@frozen
class PlacementConfig:
    """Where the replicas of one deployment run."""

    num_cpus: NonNegativeFloat = 0.5
    """Reserved per replica; for a target, per rank."""
    num_gpus: NonNegativeFloat = 0.0
    """Reserved per replica; for a target, per rank, and for all of them together in whole GPUs
    where that is more than one."""
    resources: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    """Custom Ray resources, reserved per replica or rank."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray node labels that the node must have, key to value."""
    cores: tuple[NonNegativeInt, ...] = ()
    """CPU cores, by number, that each of these processes is pinned to; empty = not pinned."""


@frozen
class EngineConfig:
    """One model on one device group: the target's model, or a drafter's."""

    REMOVED: ClassVar = {
        "weights_group": "int4 has groups of 32 inputs, so remove it",
        "compile": "our own kernels are quicker, so remove it",
    }

    model: str = ""
    """A Hugging Face folder, a GGUF file, a hub model (owner/name[@revision]) or one of `drafthouse
    models`; see docs/models.md."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV cache. auto = the checkpoint's format, or float32 where the
    CPU would have to emulate that format: not bfloat16 where our own kernels run, which sum
    products in float32."""
    device: str = "auto"
    """cpu, cuda or cuda:N. auto = the first GPU if there is one, else the CPU; an NVIDIA GPU that
    torch does not see is an error."""
    device_map: str | None = None
    """The `device_map` of transformers; it spreads one process over several devices. Not together
    with tensor_parallel."""
    quantization: Mapping[str, Any] | None = None
    """Keyword arguments of transformers' quantisation config, `quant_method` among them."""
    weights: Literal["auto", "bf16", "int8", "int4"] = "auto"
    """Format of the linear layers' weights on a CPU. auto = as stored: a GGUF file's blocks stay as
    they are. int8 and int4 are rounded at load, int8 with a scale for each 32 inputs, int4 with a
    scale and a least value; bf16 widens what is stored. In few bits inputs are rounded to 8 bits.
    Not together with quantization, nor int8 and int4 with tensor_parallel or on a GPU; see
    docs/models.md."""
    output_weights: Literal["same", "bf16"] = "same"
    """Format of the output layer's weights. bf16 = its products decide near-ties as without
    `weights`."""
    tensor_parallel: PositiveInt = 1
    """Ranks (processes) that share the layers; each needs a device of its own."""
    page_size: Annotated[int, Range(1, 1024)] = 16
    """Tokens per page of the KV cache."""
    num_pages: NonNegativeInt = 0
    """Memory of the KV cache, in pages of all layers; 0 = as much as memory_fraction allows. Layers
    with a sliding window and layers without one divide it."""
    memory_fraction: Annotated[float, Range(0.01, 1)] | None = None
    """On a GPU, the share of its memory that may be in use once the KV cache is there, by all
    processes; null = 0.9. On a CPU, the share of free memory for the KV cache, at most a quarter;
    null = 2 GiB, at most that. On a CPU its pages take memory once they are used."""
    max_running_sequences: PositiveInt = 64
    """Sequences that may hold KV pages at the same time."""
    max_context_len: NonNegativeInt = 0
    """Prompt and output together, in tokens; 0 = the model's own limit."""
    max_batch_tokens: PositiveInt = 512
    """Rows of one forward pass; a longer prefill is cut into chunks."""
    max_chunk_s: Annotated[float, Range(0.001, 3600)] = 0.2
    """What a step with a chunk of a prompt may take, if that is more than two plain ones: it has as
    few rows as fit. Four times as much where no text decodes beside it."""
    prefix_cache: bool = True
    """Keep the KV pages of finished requests for prompts that begin with the same tokens."""
    threads: NonNegativeInt = 0
    """CPU threads of one process. 0 = all cores if our own kernels run, else half of them."""
    attention: str = "auto"
    """The attention implementation (sdpa, native or triton); auto = the best one for the device."""
    reproducible: bool = False
    """Give the same text to the last bit with speculation on or off, in any batch, and on every
    replica: on any type of processor where our kernels compute the whole model, else on the same
    one (docs/exactness.md). Only on a CPU with native code (a C++ compiler, or our wheel)."""
    cuda_graphs: bool = True
    """Capture CUDA graphs at load for steps of up to 512 rows. Only where one NVIDIA GPU holds the
    whole model, or all of a tensor-parallel rank's, and its code allows that."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters of the target, name to folder as peft saves it, which requests name in `model`.
    Not together with tensor_parallel or reproducible."""
    max_adapter_rank: PositiveInt = 64
    """The largest rank that an adapter may have."""

    def __post_init__(self) -> None:
        check_that(
            self.weights == "auto" or self.quantization is None,
            "weights",
            f"{self.weights} and quantization exclude each other; remove one of them",
        )
        check_that(
            self.tensor_parallel == 1 or not self.is_rounded,
            "weights",
            f"{self.weights} is for one process, not for tensor_parallel {self.tensor_parallel}; "
            "set tensor_parallel: 1, or weights: bf16",
        )
        check_that(
            self.tensor_parallel == 1 or self.device_map is None,
            "device_map",
            f"{self.device_map!r} cannot be combined with tensor_parallel {self.tensor_parallel}; "
            "a device map spreads one process over its devices",
        )

    @property
    def is_rounded(self) -> bool:
        """True if weights are to be rounded to fewer bits than are stored."""
        return self.weights in ("int8", "int4")


@frozen
class DrafterPlacement(PlacementConfig):
    """Where one drafter runs: inside the target, or in processes of its own."""

    with_: Literal["", "target"] = ""
    """target = inside every target, on its devices and by turns with its steps; no other key may
    stand beside it."""
    application: str = ""
    """Its deployment is one of another application, whose own file section says all else of it; see
    kubernetes.md. Beside that only kind, shadow and rollout may be said here."""


@frozen
class TargetConfig:
    """The model whose text is served."""

    engine: EngineConfig = EngineConfig()
    replicas: PositiveInt = 1
    """Copies of the whole model; each has its own ranks."""
    generation_config: str = "auto"
    """Sampling defaults of requests that do not set a value. auto = the checkpoint's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens);
    none = OpenAI's defaults; or a folder that has such a file."""
    placement: PlacementConfig = PlacementConfig()


@frozen
class DrafterConfig:
    """One drafter: of the pool, or resident in the target (`Config.residents`)."""

    kind: str = ""
    """A kind of drafter that is listed below, or `module:Class` for one of your own; see
    docs/drafters.md and docs/own-drafter.md."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of that kind."""
    max_nodes: PositiveInt = 128
    """Upper bound of the tree that grows for a request."""
    max_requests: PositiveInt = 256
    """Requests that one replica holds at the same time; it declines further ones."""
    replicas: PositiveInt = 1
    """Workers that share the requests."""
    nice: Nice = 0
    """As in Unix: a drafter with a higher value gets less of a core that others want."""
    price: NonNegativeFloat = 0.0
    """Where its deployment is autoscaled: tokens per second that a replica's trees must bring to be
    worth the device. 0 = only its load counts. See docs/autoscaling.md."""
    shadow: bool = False
    """Its trees are scored by the texts that follow, and never verified."""
    rollout: RolloutConfig | None = None
    """How it comes to replace another drafter; null = it serves from the start."""
    placement: Literal["auto"] | DrafterPlacement = "auto"
    """auto = inside the target, unless it has what only processes of its own have: replicas, nice,
    or an engine on another device than the target's."""

    @property
    def reserved(self) -> DrafterPlacement:
        """The reservation of a process of its own, where it has one."""
        return DrafterPlacement() if isinstance(self.placement, str) else self.placement

    @property
    def is_hosted(self) -> bool:
        """True if it is to run inside the target, whatever else is said."""
        return self.reserved.with_ == "target"

    @property
    def application(self) -> str:
        """The application that its deployment is part of; "" = the target's."""
        return self.reserved.application

    @property
    def device(self) -> str:
        """The device that its engine names; auto where it names none, or has no engine."""
        engine = self.options.get("engine")
        return str(engine.get("device", "auto")) if isinstance(engine, Mapping) else "auto"

    @property
    def stages(self) -> tuple[str, ...]:
        """The drafters that a cascade is made of; none of any other kind."""
        found = self.options.get("stages") if self.kind == CASCADE else ()
        return tuple(map(str, found)) if isinstance(found, Sequence) else ()

    def check_resident(self, path: str, why: str = "with: target") -> None:
        """Raise ConfigError for what only a process of its own has, and none inside the target."""
        own = {
            "placement": self.placement not in ("auto", DrafterPlacement(with_="target")),
            "replicas": self.replicas > 1,
            "nice": self.nice > 0,
            "price": self.price > 0,
        }
        for key, is_set in own.items():
            check_that(
                not is_set,
                f"{path}.{key}",
                f"the drafter runs inside the target ({why}) and has no process of its own to "
                f"place; remove this{', or `with`' * self.is_hosted}",
            )


@frozen
class CoordinatorConfig:
    """The process that opens texts at the targets and asks the pool's drafters."""

    REMOVED: ClassVar = {
        "max_draft_wait_ms": "a target's steps wait for no drafter, so remove it",
        "max_homogeneity_wait_ms": "no text waits for others of its kind, so remove it",
        "policy": "the control loop prices drafts in every step, so remove it",
        "cohorts": "a target goes from step to step by itself, so remove it",
        "min_tokens_per_s": "remove it, and weigh requests by coordinator.latency_classes",
        "laws=block": REMOVED_LAWS["block"],
    }

    replicas: PositiveInt = 1
    """Number of coordinators. Each of them opens texts at every target and asks every drafter; if
    one dies, its requests go on at another. They share the limits below."""
    placement: PlacementConfig = PlacementConfig()
    nice: Nice = 0
    """As in Unix. Where it shares cores with a target on a CPU, 19 lets it run between two steps of
    the target, and not in the middle of one."""
    max_running_sequences: PositiveInt = 64
    """Requests that are decoded at the same time; the others wait in the queue."""
    max_queued_requests: NonNegativeInt = 256
    """Length of the queue; further requests are answered 429."""
    max_queued_tokens: PositiveInt = 2**20
    """Tokens of the prompts in the queue together; further requests are answered 429. One may wait
    whatever its length."""
    max_draft_tokens: NonNegativeInt = 16
    """Draft tokens that one step may verify per sequence."""
    budget: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive = verify as many draft tokens as pay, judged by measured step times and acceptance;
    fixed = always max_draft_tokens, or what draft_length leaves of it."""
    draft_length: DraftLengthConfig = DraftLengthConfig()
    max_slowdown: Share = 0.02
    """Share of plain decoding's time that speculation may cost while drafts are rejected."""
    slowdown_slack: Annotated[float, Range(0, 1000)] = 8.0
    """Plain steps whose time speculation may cost beyond max_slowdown before it has saved any. With
    n sequences running, their number is divided by the square root of n. What speculation has
    saved since may be lost again, up to four times as many steps."""
    # Weights far apart leave the lighter requests without a node for good.
    latency_classes: Mapping[Name, Annotated[float, Range(0.01, 100)]] = field(
        default_factory=lambda: {"throughput": 1.0, "interactive": 4.0}
    )
    """Named weights of requests. When draft tokens are shared out, the time saved for a request
    counts this much. A request names its class in `speculation.latency_class`; without one it
    counts 1."""
    laws: tuple[Law, ...] = ("coupled",)
    """How drafts may be accepted; a request chooses in `speculation.law`, and one that does not
    gets the first. Under every law texts follow the model's own law. coupled = a draft is accepted
    where it is what the model draws itself: the text is the same with any drafts. The others are
    the textbook's, and there the text depends on the drafts: rejection = speculative sampling of
    chains, multi_step = of siblings drawn without replacement."""
    audit: AuditConfig = AuditConfig()
    switchback: SwitchbackConfig = SwitchbackConfig()
    keep_learned: bool = True
    """Keep what the control loop has learned (step times, scores of drafters) in the cache of
    models, and begin with it at the next start of the same models on the same machine."""
    max_frame_bytes: Annotated[int, Range(65536, 2**31 - 1)] = 4 * 1024 * 1024
    """Larger gRPC messages between the parts are refused."""
    breaker_failures: PositiveInt = 3
    """A drafter that fails so often in a row is left alone."""
    breaker_reset_s: Seconds = 2.0
    """How long it is left alone."""
    # Of two words that are missed one may just be late.
    target_silence_s: Annotated[float, Range(2, MAX_SECONDS)] = 3.0
    """A target with work, or a coordinator, that says nothing for so long is given up, and its
    requests move to another. Each says every second that it is there."""
    target_timeout_s: Annotated[float, Range(0.1, MAX_SECONDS)] = 120.0
    """A target that says it computes, but ends no step for so long, is given up. Requests wait as
    long for a target, or for a coordinator, when there is none."""

    @property
    def max_frame_tokens(self) -> int:
        """Tokens, of 4 bytes each, that fill half of a frame: the rest is for all else."""
        return self.max_frame_bytes // 8

    def __post_init__(self) -> None:
        check_that(
            self.replicas <= self.max_running_sequences,
            "replicas",
            f"{self.replicas} coordinators share the {self.max_running_sequences} places of "
            "coordinator.max_running_sequences, so that some would have none; lower replicas or "
            "raise that",
        )
        check_that(self.laws, "laws", "empty; name at least one, such as coupled")
