"""The keys that may change while the parts run: `user_config` lays them over the arguments.

Ray Serve passes the `user_config` of each deployment on to its replicas, and restarts nothing.  A
key is told to every deployment that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cluster.config.parse import check_keys, check_known, check_that, mapping, overlaid
from cluster.config.references import check, check_drafters
from cluster.config.schema import Config
from cluster.errors import ConfigError

DRAFTERS = "drafters"
OPTIONS = "drafters.NAME.options"  # of one inside the target
INGRESS, COORDINATOR, TARGET = "ingress", "coordinator", "target"

# The deployments that read each key.  All else is read once, at the start, or by who starts them.
_READ: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (INGRESS, COORDINATOR): (
        "tasks",
        DRAFTERS,
        "coordinator.max_running_sequences",
        "coordinator.max_queued_requests",
    ),
    (INGRESS, COORDINATOR, TARGET): (
        "coordinator.max_draft_tokens",
        "coordinator.latency_classes",
    ),
    (COORDINATOR,): (
        "coordinator.max_queued_tokens",
        "coordinator.audit",
        "coordinator.switchback",
    ),
    (COORDINATOR, TARGET): ("coordinator.budget",),
    (TARGET,): (
        OPTIONS,
        "coordinator.draft_length",
        "coordinator.max_slowdown",
        "coordinator.slowdown_slack",
        "adapters",
    ),
    (INGRESS,): (
        "ingress.replicas",
        "ingress.body_timeout_s",
        "ingress.max_sequences_per_request",
        "ingress.max_chars_per_token",
        "ingress.public_latency_classes",
        "ingress.segments",
        "ingress.max_choices",
        "ingress.max_logprobs",
        "ingress.max_stop_strings",
        "ingress.default_max_tokens",
        "api.compatibility",
        "api.served_model_names",
        "api.heartbeat_s",
        "api.max_request_timeout_s",
    ),
}
READ_BY = {key: readers for readers, keys in _READ.items() for key in keys}

# The keys of a drafter of the pool, in the `user_config` of its own deployment; it is made anew
# inside its process.
OF_A_DRAFTER = ("kind", "options", "max_nodes", "max_requests", "price")

_FIXED = (
    "this key cannot change while the parts run; set it below args, which restarts the application"
)


def changed(config: Config, user_config: Any, path: str = "user_config") -> Config:
    """Return `config` with the `user_config` of a deployment, which may change while it serves.

    path: where it stands, for messages.  Raises ConfigError for what cannot be served, or cannot
    change."""
    with ConfigError.below(path):
        section = dict(mapping(user_config))
        check_keys(section, (*(field.name for field in fields(Config)), "adapters"))
        adapters = section.pop("adapters", None)
        told = mapping(section.get(DRAFTERS), DRAFTERS)
        hosted = (*config.residents, *config.hosted)
        inside = {
            name: overlaid(config.drafters[name], told[name], f"{DRAFTERS}.{name}")
            for name in hosted
            if _is_of_options(told.get(name))
        }
        drafters = {**config.drafters, **told, **inside}
        result = overlaid(config, {**section, DRAFTERS: drafters})
        for key, (name, _) in _told(section):
            check_known(name, READ_BY, key, _FIXED, "keys that can")
        for name in (each for each in told if each not in inside):
            former, drafter = config.drafters.get(name), result.drafters[name]
            check_that(
                drafter.application and (former is None or former.application),
                f"{DRAFTERS}.{name}",
                "only a drafter of another application comes and goes while the parts run, and of "
                "one inside the target its options may change; give it placement: {application: "
                "NAME}, set it below args, or name options alone (those of a drafter with a "
                f"process of its own: in the user_config of drafter-{name})",
            )
        for name in hosted:
            check_that(
                name in (*result.residents, *result.hosted),
                f"{DRAFTERS}.{name}",
                "with these options no drafter of the target's process; none leaves it while the "
                "parts run: leave engine.device and stages as they are, or set them below args",
            )
        if adapters is not None:
            result = _with_adapters(result, adapters)
    check(result)
    return result


def changed_drafter(
    config: Config, name: str, user_config: Any, path: str = "user_config"
) -> Config:
    """Return `config` with the `user_config` of a drafter's own deployment; see `changed`."""
    drafter = overlaid(config.drafters[name], user_config, path)
    with ConfigError.below(path):
        for key in mapping(user_config):
            check_known(key, OF_A_DRAFTER, key, _FIXED, "keys that can")
    result = replace(config, drafters={**config.drafters, name: drafter})
    check_drafters(result)
    return result


def check_told(told: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a key that not all who read it are told alike.

    told: user_configs by deployment."""
    values = {name: dict(_told(mapping(given, path))) for name, given in told.items()}
    for name, given in values.items():
        for key, (known, _) in given.items():
            for reader in READ_BY[known]:
                check_that(
                    values.get(reader, {}).get(key, (known, None)) == given[key],
                    path,
                    f"{name} is told {key} and {reader} reads it, too, and is told something else "
                    "or nothing; give all of them the same user_config (write it once, as a YAML "
                    "anchor)",
                )


def _is_of_options(told: Any) -> bool:
    """True if of a drafter nothing is told but its options, with which it is made anew."""
    return isinstance(told, Mapping) and set(told) == {"options"}


def _with_adapters(config: Config, adapters: Any) -> Config:
    engine = overlaid(config.target.engine, {"adapters": adapters})
    for name, folder in engine.adapters.items():
        check_that(
            Path(folder).is_absolute(),
            f"adapters.{name}",
            f"{folder!r} is a relative path; a target runs in another folder, so give an absolute "
            "one",
        )
    return replace(config, target=replace(config.target, engine=engine))


def _told(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yield the paths of the keys that a `user_config` sets, each with its name in READ_BY and its
    value; all others as deep as that goes."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        is_above = any(known.startswith(f"{path}.") for known in READ_BY)
        if path == DRAFTERS:
            for name, each in mapping(value).items():
                if _is_of_options(each):
                    yield f"{path}.{name}.options", (OPTIONS, each["options"])
                else:
                    yield f"{path}.{name}", (DRAFTERS, each)
        elif is_above and isinstance(value, Mapping):
            yield from _told(value, f"{path}.")
        elif not (is_above and value is None):  # a block that was left empty
            yield path, (path, value)
