"""What a configuration must obey beyond its types: ranges, and references between its parts.

Types and key names are checked while parsing (`cluster.config.schema`); these rules need the whole.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.config.answers import AnswersConfig
from cluster.config.api import ApiConfig, GrpcConfig, HttpConfig
from cluster.config.schema import (
    Config,
    CoordinatorConfig,
    DashboardConfig,
    DrafterConfig,
    DrafterPlacement,
    EngineConfig,
    IngressConfig,
    PlacementConfig,
    TargetConfig,
)
from cluster.errors import ConfigError, NotFoundError

Range = tuple[float, float]

_COUNT: Range = (1, math.inf)
_OPTIONAL_COUNT: Range = (0, math.inf)
_PORT: Range = (1, 65535)
# Weights far apart leave the lighter requests without a node for good.
_WEIGHT: Range = (0.01, 100)

_AMOUNTS = {"num_cpus": _OPTIONAL_COUNT, "num_gpus": _OPTIONAL_COUNT}

# A target that computes says so once a second: of two words that it missed one may just be late.
_SILENCE: Range = (2.0, math.inf)

# Both ends are allowed.
RANGES: Mapping[type, Mapping[str, Range]] = {
    EngineConfig: {
        "tensor_parallel": _COUNT,
        "page_size": _COUNT,
        "num_pages": _OPTIONAL_COUNT,
        "memory_fraction": (0.01, 1.0),
        "max_running_sequences": _COUNT,
        "max_context_len": _OPTIONAL_COUNT,
        "max_batch_tokens": _COUNT,
        "threads": _OPTIONAL_COUNT,
        "max_adapter_rank": _COUNT,
    },
    PlacementConfig: _AMOUNTS,
    DrafterPlacement: _AMOUNTS,
    TargetConfig: {"replicas": _COUNT},
    DrafterConfig: {
        "max_nodes": _COUNT,
        "max_requests": _COUNT,
        "replicas": _COUNT,
        "nice": (0, 19),
    },
    CoordinatorConfig: {
        "replicas": _COUNT,
        "max_running_sequences": _COUNT,
        "max_queued_requests": _OPTIONAL_COUNT,
        "max_draft_tokens": _OPTIONAL_COUNT,
        "max_slowdown": (0, 1),
        "slowdown_slack": (0, 1000),
        "max_frame_bytes": (65536, 2**31 - 1),
        "breaker_failures": _COUNT,
        "breaker_reset_s": _OPTIONAL_COUNT,
        "target_silence_s": _SILENCE,
        "target_timeout_s": (0.1, math.inf),
    },
    IngressConfig: {
        "replicas": _COUNT,
        "max_body_bytes": (1024, math.inf),
        "body_timeout_s": (0.1, 3600),
        "shutdown_grace_s": (0, 3600),
        "max_sequences_per_request": _COUNT,
        "max_chars_per_token": (1, math.inf),
        "max_choices": _COUNT,
        "max_logprobs": _OPTIONAL_COUNT,
        "max_stop_strings": _OPTIONAL_COUNT,
        "default_max_tokens": _OPTIONAL_COUNT,
    },
    AnswersConfig: {"max_grammar_bytes": _COUNT, "grammar_timeout_s": (0.01, 60)},
    ApiConfig: {
        "heartbeat_s": _OPTIONAL_COUNT,
        "max_request_timeout_s": _OPTIONAL_COUNT,
        "max_stored_responses": _OPTIONAL_COUNT,
        "max_stored_bytes": _OPTIONAL_COUNT,
    },
    HttpConfig: {"port": _PORT},
    GrpcConfig: {"port": _PORT},
    DashboardConfig: {"port": _PORT},
}

# All of them lie in memory beside the model.
_MAX_ADAPTERS = 64

# Adapters are asked for by name, as models are.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

# Names become parts of Serve deployment names and of metric labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_rules(config: Config) -> None:
    """Raise ConfigError, with the path of the key, for the first rule that `config` breaks."""
    for path, record in _records(config, ""):
        for name, (low, high) in RANGES.get(type(record), {}).items():
            value = getattr(record, name)
            if value is not None:  # a default that depends on the machine
                _check_range(value, low, high, f"{path}.{name}")
        if isinstance(record, CoordinatorConfig):
            for name, weight in record.latency_classes.items():
                _check_range(weight, *_WEIGHT, f"{path}.latency_classes.{name}")
        if isinstance(record, PlacementConfig):
            for resource, amount in record.resources.items():
                _check_range(amount, 0, math.inf, f"{path}.resources.{resource}")
            for place, core in enumerate(record.cores):
                _check_range(core, 0, math.inf, f"{path}.cores[{place}]")
    _check_names(config)
    _check_target(config)
    _check_residents(config)
    _check_coordinators(config)


def check_ports(config: Config) -> None:
    """Raise ConfigError when two of our servers would listen on the same port.

    Apart from the other rules: ports of Serve's proxies stand in its own sections, which a replica
    does not know.
    """
    ports = {"http.port": config.http.port, "grpc.port": config.grpc.port}
    if config.dashboard.enabled:
        ports["dashboard.port"] = config.dashboard.port
    taken: dict[int, str] = {}
    for path, port in ports.items():
        if port in taken:
            raise ConfigError(f"{path}: {port} is already {taken[port]}; change one", param=path)
        taken[port] = path


def _records(record: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every dataclass inside `record`, itself included, with its path."""
    yield path, record
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        below = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from _records(value, below)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if dataclasses.is_dataclass(item):
                    yield from _records(item, f"{below}.{key}")


def _check_range(value: float, low: float, high: float, path: str) -> None:
    if low <= value <= high:  # false for NaN, which is the intention
        return
    bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
    raise ConfigError(f"{path}: {value:g} is out of range; it must be {bounds}", param=path)


def _check_names(config: Config) -> None:
    for name in config.coordinator.latency_classes:
        if not _NAME.fullmatch(name):
            path = f"coordinator.latency_classes.{name}"
            raise ConfigError(
                f"{path}: a class's name may hold letters, digits, '_' and '-' only", param=path
            )
    for name in config.public_latency_classes:
        if name not in config.coordinator.latency_classes:
            known = ", ".join(config.coordinator.latency_classes) or "none"
            path = "ingress.public_latency_classes"
            raise ConfigError(f"{path}: {name!r} is no class; classes: {known}", param=path)
    for name in config.drafters:
        if not _NAME.fullmatch(name):
            path = f"drafters.{name}"
            raise ConfigError(
                f"{path}: a drafter's name may hold letters, digits, '_' and '-' only", param=path
            )
    for task, names in config.tasks.items():
        path = f"tasks.{task}"
        for position, name in enumerate(names):
            if name in names[:position]:
                raise ConfigError(f"{path}: {name!r} stands twice; name it once", param=path)
            if name in config.drafters:
                continue
            near = difflib.get_close_matches(name, config.drafters, n=1, cutoff=0.5)
            known = ", ".join(config.drafters) or "none"
            hint = f"did you mean {near[0]}?" if near else f"drafters: {known}"
            raise ConfigError(f"{path}: no drafter is named {name!r} ({hint})", param=path)


def _check_target(config: Config) -> None:
    engine = config.target.engine
    if not engine.model:
        path = "target.engine.model"
        raise ConfigError(
            f"{path}: no model is named; set it to a Hugging Face folder or hub name", param=path
        )
    _check_adapters(config)
    if engine.device_map is not None and engine.tensor_parallel > 1:
        path = "target.engine.device_map"
        raise ConfigError(
            f"{path}: {engine.device_map!r} cannot be combined with tensor_parallel "
            f"{engine.tensor_parallel}; a device map spreads one process over its devices",
            param=path,
        )


def _check_adapters(config: Config) -> None:
    adapters, path = config.target.engine.adapters, "target.engine.adapters"
    if len(adapters) > _MAX_ADAPTERS:
        raise ConfigError(
            f"{path}: {len(adapters)} adapters; at most {_MAX_ADAPTERS} are served", param=path
        )
    for name in adapters:
        if not _MODEL_NAME.fullmatch(name) or name == config.model_name:
            raise ConfigError(
                f"{path}.{name}: an adapter's name may hold up to 128 letters, digits, '.', '_', "
                "'/' and '-', and may not be the model's own",
                param=f"{path}.{name}",
            )


def _check_residents(config: Config) -> None:
    """What only processes of their own can have is not asked of drafters inside the target."""
    for name in config.residents:
        drafter, path = config.drafters[name], f"drafters.{name}"
        own = {
            f"{path}.placement": drafter.placement not in ("auto", DrafterPlacement(host="target")),
            f"{path}.replicas": drafter.replicas > 1,
            f"{path}.nice": drafter.nice > 0,
        }
        for key in (key for key, is_set in own.items() if is_set):
            raise ConfigError(
                f"{key}: the drafter runs inside the target (with: target) and has no process of "
                "its own to place; remove this, or `with`",
                param=key,
            )


def _check_coordinators(config: Config) -> None:
    """One coordinator leads all targets: nothing keeps a second one from leading them as well."""
    count = config.coordinator.replicas
    if count > 1:
        path = "coordinator.replicas"
        raise ConfigError(
            f"{path}: {count} coordinators would each lead every target, so that their batches "
            "queue behind each other and neither knows what a step costs; set it to 1, and raise "
            "ingress.replicas where text is the bottleneck, target.replicas where the model is",
            param=path,
        )


def check_in_pool(config: Config, name: str) -> None:
    """Raise NotFoundError unless a drafter of that name runs in a process of its own."""
    if name in config.residents:
        raise NotFoundError(
            f"drafter {name!r} runs inside the target; to run it in a process of its own, give it "
            f"one: drafters.{name}.placement={{num_cpus: 1}}"
        )
    if name not in config.drafters:
        known = ", ".join(config.pool) or "none"
        raise NotFoundError(f"no drafter is named {name!r}; the pool of the file has: {known}")
