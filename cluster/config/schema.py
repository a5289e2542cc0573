"""One strict schema for everything an operator can set. The defaults live here and nowhere else.

A configuration file is an ordinary Ray Serve config file; ours sits in `applications[0].args`. An
unknown or mistyped key stops start-up with its path and the nearest known key.

A field's type says which values are allowed, and the text below it what they mean;
docs/configuration.md is made of both. What several keys must obey together stands in
`references.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from cluster.config.doors import (
    AccessConfig,
    ApiConfig,
    DashboardConfig,
    GrpcConfig,
    HttpConfig,
    NetworkConfig,
    UiConfig,
    Url,
)
from cluster.config.parse import (
    Line,
    Name,
    Nice,
    NonNegativeInt,
    PositiveInt,
    Range,
)
from cluster.config.pem import DataPlaneConfig, TlsConfig
from cluster.config.processes import (
    CoordinatorConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    PlacementConfig,
    TargetConfig,
)
from cluster.config.speculation import RolloutConfig
from cluster.logs import LogFormat
from cluster.records import frozen

# Of other modules, which have them from here.
__all__ = [
    "ApiConfig",
    "CoordinatorConfig",
    "DashboardConfig",
    "DrafterConfig",
    "DrafterPlacement",
    "EngineConfig",
    "GrpcConfig",
    "HttpConfig",
    "NetworkConfig",
    "PlacementConfig",
    "TargetConfig",
]


OTHER_SEGMENT = "other"


@frozen
class IngressConfig:
    """The HTTP and gRPC front end, and its limits."""

    replicas: PositiveInt = 1
    """Ingress processes; each uses one core to tokenise and detokenise."""
    placement: PlacementConfig = PlacementConfig()
    nice: Nice = 0
    """As coordinator.nice."""
    max_body_bytes: Annotated[int, Range(1024)] = 4 * 1024 * 1024
    """Larger request bodies are answered 413, and so are those that are larger once unpacked."""
    body_timeout_s: Annotated[float, Range(0.1, 3600)] = 30.0
    """A body that has not arrived within this time is answered 408."""
    max_sequences_per_request: PositiveInt = 64
    """Upper bound of prompts times `n`, so that no request fills the queue."""
    max_chars_per_token: Annotated[float, Range(1)] = 16.0
    """A prompt with more characters than this times the context length in tokens is refused before
    it is tokenised. English text has 4 to 5, deeply indented code up to 10."""
    public_latency_classes: tuple[str, ...] | None = None
    """The coordinator.latency_classes that requests may name. null = those that count at most 1, so
    that no client can go before others."""
    segments: tuple[Name, ...] = ()
    """Names of the kinds of traffic that metrics tell apart, at most 32. A request belongs to that
    of its API key, else of its header X-Drafthouse-Segment, its metadata.segment or its user; all
    others are `other`. Empty = there are none."""
    max_choices: PositiveInt = 16
    """Upper bound of `n`."""
    max_logprobs: NonNegativeInt = 20
    """Upper bound of `logprobs` and `top_logprobs`."""
    max_stop_strings: NonNegativeInt = 16
    """Upper bound of stop strings per request."""
    default_max_tokens: NonNegativeInt = 0
    """Output tokens of a chat or gRPC request that sets no limit. 0 = the checkpoint's limit
    (target.generation_config), else the rest of the context. Completions have OpenAI's default,
    16."""
    log_requests: bool = True
    """Write a line for every request that ends: its id, tokens and times, no content."""
    shutdown_grace_s: Annotated[float, Range(0, 3600)] = 30.0
    """When the server stops, it takes no new request, and answers that are under way have so long
    to end; those that are not over then end with an error."""
    traces_url: Url = ""
    """Where spans of requests go, by OTLP over HTTP, such as http://HOST:4318/v1/traces; empty =
    there are none. Needs the extra `otel`."""


@frozen
class AnswersConfig:
    """How answers are held to a grammar, and how tool calls and reasoning are found in them."""

    REMOVED: ClassVar = {
        "grammar_backend": "llguidance compiles all grammars, so remove it",
    }

    max_grammar_bytes: PositiveInt = 256 * 1024
    """Requests with a longer schema or grammar are answered 400."""
    grammar_timeout_s: Annotated[float, Range(0.01, 60)] = 2.0
    """One that takes more processor time to compile is answered 400."""
    grammar_memory_bytes: Annotated[int, Range(2**24)] = 128 * 1024 * 1024
    """And so is one that takes more memory, beside that of the vocabulary. A target keeps up to 128
    of them."""
    max_grammars_in_flight: PositiveInt = 64
    """Grammars of one tenant that are compiled or wait for that; more are answered 429."""
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "deepseek", "harmony"] = (
        "auto"
    )
    """The format of the model's tool calls (hermes, llama3, mistral, deepseek or harmony). auto =
    what its chat template shows; none = tools are refused."""
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = "auto"
    """How the model marks its reasoning (think or harmony). auto = what its chat template shows;
    none = reasoning stays a part of the answer."""
    chat_template: str = ""
    """A file with a Jinja template in place of the model's own, below the working directory or the
    repository; for a model whose own has no place for tools, say."""


@frozen
class Config:
    """The keys beside the sections."""

    REMOVED: ClassVar = {
        "infer_tasks": "requests name their task in metadata.task, so remove it",
    }

    model_name: Line = ""
    """The name that clients ask for. Empty = the model's own: a folder's last part, a GGUF file's
    name without its ending, or the name on the hub or in `drafthouse models`."""
    target: TargetConfig = TargetConfig()
    drafters: Mapping[Name, DrafterConfig] = field(default_factory=dict)
    """By name."""
    tasks: Mapping[Line, tuple[str, ...]] = field(default_factory=dict)
    """For each task class, the drafters that serve it, best first. The class `default` is for
    requests that name no class or an unknown one; without it, such requests have every drafter."""
    log_format: LogFormat = "text"
    """How every process writes its log. json = one object a line, with time, level, logger, message
    and, where it is known, request_id."""
    coordinator: CoordinatorConfig = CoordinatorConfig()
    ingress: IngressConfig = IngressConfig()
    answers: AnswersConfig = AnswersConfig()
    api: ApiConfig = ApiConfig()
    http: HttpConfig = HttpConfig()
    ui: UiConfig = UiConfig()
    grpc: GrpcConfig = GrpcConfig()
    tls: TlsConfig = TlsConfig()
    access: AccessConfig = AccessConfig()
    network: NetworkConfig = NetworkConfig()
    data_plane: DataPlaneConfig = DataPlaneConfig()
    dashboard: DashboardConfig = DashboardConfig()

    @property
    def public_latency_classes(self) -> tuple[str, ...]:
        """The latency classes that requests may name."""
        allowed, weights = self.ingress.public_latency_classes, self.coordinator.latency_classes
        if allowed is not None:
            return allowed
        return tuple(name for name, weight in weights.items() if weight <= 1.0)

    @property
    def listeners(self) -> Mapping[str, tuple[str, int]]:
        """Host and port of each of our servers, and of Ray's dashboard, by its section."""
        found = {"http": self.http, "grpc": self.grpc, "access.admin": self.access.admin}
        if self.dashboard.enabled:
            found["dashboard"] = self.dashboard
        return {name: (each.host, each.port) for name, each in found.items() if each.port}

    @property
    def max_calls(self) -> int:
        """The calls that an ingress has at a time, far more than it admits."""
        limits = self.coordinator
        return max(1024, 4 * (limits.max_running_sequences + limits.max_queued_requests))

    @property
    def stage_of(self) -> Mapping[str, str]:
        """Of each drafter that is a stage, the cascade in which it runs."""
        return {stage: name for name, each in self.drafters.items() for stage in each.stages}

    @property
    def residents(self) -> tuple[str, ...]:
        """Names of the drafters that run inside the target, without stages."""
        return tuple(filter(self._is_resident, self.on_their_own))

    @property
    def hosted(self) -> tuple[str, ...]:
        """Names of all drafters inside the target, with the stages in place of their cascades."""
        return tuple(
            part for name in self.residents for part in self.drafters[name].stages or (name,)
        )

    @property
    def pool(self) -> tuple[str, ...]:
        """Names of the drafters that run in processes of their own, without stages."""
        return tuple(name for name in self.on_their_own if not self._is_resident(name))

    @property
    def elsewhere(self) -> Mapping[str, str]:
        """The application of each drafter that is part of another one."""
        drafters = self.drafters.items()
        return {name: each.application for name, each in drafters if each.application}

    @property
    def shadows(self) -> frozenset[str]:
        """Names of the drafters that are scored and never verified."""
        return frozenset(name for name, drafter in self.drafters.items() if drafter.shadow)

    @property
    def rollouts(self) -> Mapping[str, RolloutConfig]:
        """The rollouts of drafters that may replace others, by their names."""
        drafters = self.drafters.items()
        return {name: each.rollout for name, each in drafters if each.rollout is not None}

    @property
    def on_their_own(self) -> tuple[str, ...]:
        """Names of the drafters that texts may ask for: all but the stages of cascades."""
        stages = self.stage_of
        return tuple(name for name in self.drafters if name not in stages)

    def computes(self, name: str) -> bool:
        """True if a drafter, or a stage of it, has a model, or code that is not known here."""
        parts = [self.drafters[each] for each in self.drafters[name].stages or (name,)]
        return any(":" in each.kind or "engine" in each.options for each in parts)

    def _is_resident(self, name: str) -> bool:
        drafter = self.drafters[name]
        if not isinstance(drafter.placement, str):
            return drafter.is_hosted
        has_own = drafter.replicas > 1 or drafter.nice > 0
        return not has_own and drafter.device in ("auto", self.target.engine.device)

    def drafters_of(self, task: str) -> tuple[str, ...]:
        """Names of the drafters that serve `task`, best first."""
        if task in self.tasks:
            return self.tasks[task]
        return self.tasks.get("default", self.on_their_own)
