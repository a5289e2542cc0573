"""The keys that may change while the parts run: `user_config` lays them over the arguments.

Ray Serve passes the `user_config` of each deployment on to its replicas, and restarts nothing.  A
key is told to every deployment that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cluster.config.parse import check_keys, mapping, nearest, overlaid
from cluster.config.references import check_stages, check_tasks
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


def changed(config: Config, user_config: Any, path: str = "user_config") -> Config:
    """Return `config` with the `user_config` of a deployment, which may change while it serves.

    path: where it stands, for messages.  Raises ConfigError for what cannot be served, or cannot
    change."""
    section = dict(mapping(user_config, path))
    check_keys(section, (*(field.name for field in fields(Config)), "adapters"), path)
    adapters = section.pop("adapters", None)
    config = _with_options(config, section, path)
    result = overlaid(config, section, path)
    for key, _ in _told(section):
        if known_as(key) not in READ_BY:
            hint = nearest(key, READ_BY, "keys that can")
            raise ConfigError.at(
                f"{path}.{key}",
                "this key cannot change while the parts run; set it below args, which restarts "
                f"the application ({hint})",
            )
    for name in mapping(section.get(DRAFTERS), path):
        former, drafter = config.drafters.get(name), result.drafters[name]
        if not drafter.application or (former is not None and not former.application):
            raise ConfigError.at(
                f"{path}.drafters.{name}",
                "only a drafter of another application comes and goes while the parts run, and of "
                "one inside the target its options may change; give it placement: {application: "
                "NAME}, set it below args, or name options alone (those of a drafter with a "
                f"process of its own stand in the user_config of drafter-{name})",
            )
    if adapters is not None:
        result = _with_adapters(result, mapping(adapters, f"{path}.adapters"), path)
    result.check()
    return result


def changed_drafter(
    config: Config, name: str, user_config: Any, path: str = "user_config"
) -> Config:
    """Return `config` with the `user_config` of a drafter's own deployment; see `changed`."""
    drafter = overlaid(config.drafters[name], user_config, path)
    for key in mapping(user_config, path):
        if key not in OF_A_DRAFTER:
            raise ConfigError.at(
                f"{path}.{key}",
                "this key cannot change while the drafter runs; set it below args, which restarts "
                f"the application (keys that can: {', '.join(OF_A_DRAFTER)})",
            )
    result = replace(config, drafters={**config.drafters, name: drafter})
    check_stages(result.drafters)
    check_tasks(result.tasks, result.drafters)
    return result


def check_told(told: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a key that not all who read it are told alike.

    told: user_configs by deployment."""
    values = {name: dict(_told(mapping(given, path))) for name, given in told.items()}
    for name, given in values.items():
        for key, value in given.items():
            for reader in READ_BY[known_as(key)]:
                if reader != name and values.get(reader, {}).get(key) != value:
                    raise ConfigError.at(
                        path,
                        f"{name} is told {key} and {reader} reads it, too, and is told something "
                        "else or nothing; give all of them the same user_config (write it once, as "
                        "a YAML anchor)",
                    )


def _with_options(config: Config, section: dict[str, Any], path: str) -> Config:
    """Return `config` with the options of drafters inside the target, and take them out of
    `section`."""
    told, drafters = dict(mapping(section.get(DRAFTERS), path)), dict(config.drafters)
    for name in (*config.residents, *config.hosted):
        if _is_of_options(told.get(name)):
            where = f"{path}.{DRAFTERS}.{name}"
            drafters[name] = overlaid(drafters[name], told.pop(name), where)
            section[DRAFTERS] = told
    return replace(config, drafters=drafters)


def known_as(key: str) -> str:
    """The name of READ_BY for the path of a key."""
    return OPTIONS if key.startswith(f"{DRAFTERS}.") and key.endswith(".options") else key


def _is_of_options(told: Any) -> bool:
    """True if of a drafter nothing is told but its options, with which it is made anew."""
    return isinstance(told, Mapping) and set(told) == {"options"}


def _with_adapters(config: Config, adapters: Mapping[str, Any], path: str) -> Config:
    engine = overlaid(config.target.engine, {"adapters": adapters}, path)
    for name, folder in engine.adapters.items():
        if not Path(folder).is_absolute():
            raise ConfigError.at(
                f"{path}.adapters.{name}",
                f"{folder!r} is a relative path; a target runs in another folder, so give an "
                "absolute one",
            )
    return replace(config, target=replace(config.target, engine=engine))


def _told(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys that a `user_config` sets with their values: as READ_BY names them, and all
    others as deep as that goes."""
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path == DRAFTERS:
            told = mapping(value, path)
            options = [name for name in told if _is_of_options(told[name])]
            yield from ((f"{path}.{name}.options", told[name]["options"]) for name in options)
            if not told or len(options) < len(told):
                yield path, value
            continue
        is_above = any(known.startswith(f"{path}.") for known in READ_BY)
        if is_above and isinstance(value, Mapping):
            yield from _told(value, f"{path}.")
        elif not (is_above and value is None):  # a block that was left empty
            yield path, value
