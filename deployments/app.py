"""The application on one screen: Ingress -> Coordinator -> Target + one deployment per drafter of
the pool; the others are inside the target.  The pool may be an application of its own, which
restarts apart.

`build` and `build_pool` are pure functions of the configuration.  Ray Serve places, heals and
scales what they return; tokens never pass through Serve's handles, only the search for endpoints
does.  `begin` hands the applications of a file to Serve, as `serve deploy` would.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.constants import SERVE_DEFAULT_APP_NAME
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.context import _get_global_client
from ray.serve.schema import LoggingConfig, ServeApplicationSchema

from cluster.config.applications import drafter_deployment, is_pool, parse_pool
from cluster.config.file import ServeFile, parse_arguments
from cluster.config.live import COORDINATOR, INGRESS, TARGET
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.models.resolve import absolute
from deployments.coordinator import CoordinatorDeployment
from deployments.drafter import DrafterDeployment
from deployments.ingress.deployment import DRAIN_MARGIN_S, IngressDeployment
from deployments.placement import Placed, placed, placed_drafter
from deployments.target import TargetDeployment

_COMMON: Mapping[str, Any] = {
    # A killed replica is missed at its next health check and must be back within about two
    # seconds; a check costs a call per replica and period.
    "health_check_period_s": 1,
    # An overloaded machine answers late: three misses of ten seconds mean dead, not busy.
    "health_check_timeout_s": 10,
    # A model that cannot be loaded will not load at the twentieth attempt either.
    "max_constructor_retry_count": 3,
}

# Replicas that other parts call by gRPC; through Serve they are only found and asked for health.
_WORKER: Mapping[str, Any] = {
    **_COMMON,
    "max_ongoing_requests": 64,
    # Their streams can be continued elsewhere, so there is nothing to wait for.
    "graceful_shutdown_wait_loop_s": 0.1,
    "graceful_shutdown_timeout_s": 10,
}


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The Serve application for `args` of a config file; raises ConfigError for a wrong key."""
    config = parse_arguments(resolved(arguments))
    parts = placed(config)
    target = _deployment(config, TargetDeployment, TARGET, parts[TARGET], _WORKER).bind(config)
    drafters = [_drafter(config, name) for name in config.pool if name not in config.elsewhere]
    coordinator = _deployment(
        config, CoordinatorDeployment, COORDINATOR, parts[COORDINATOR], _WORKER
    ).bind(config, target, drafters)
    of_ingress = {
        **_COMMON,
        # Admission is ours, in OpenAI's shape: Serve's own limit must never be what answers.
        "max_ongoing_requests": config.max_calls,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": config.ingress.shutdown_grace_s + DRAIN_MARGIN_S,
    }
    ingress = _deployment(config, IngressDeployment, INGRESS, parts[INGRESS], of_ingress)
    return ingress.bind(config, coordinator)


def build_pool(arguments: Mapping[str, Any]) -> serve.Application:
    """The application of drafters alone, for its `args`; raises ConfigError for a wrong key."""
    config = parse_pool(resolved(arguments))
    first, *others = config.on_their_own
    # Serve deploys what hangs together: one drafter is given the others, and has no use for them.
    return _drafter(config, first, [_drafter(config, name) for name in others])


def _drafter(config: Config, name: str, *others: Any) -> serve.Application:
    deployed, where = drafter_deployment(name), placed_drafter(config, name)
    deployment = _deployment(config, DrafterDeployment, deployed, where, _WORKER)
    return deployment.bind(config, name, *others)


def serves_logging(config: Config) -> dict[str, Any]:
    """Return what Serve's own messages are logged by."""
    # Access logs cost time per request and hold what clients asked for.
    return {"enable_access_log": False, "encoding": config.log_format.upper()}


def _deployment(
    config: Config, kind: Any, name: str, where: Placed, options: Mapping[str, Any]
) -> Any:
    told = {**options, **where.options(), "logging_config": serves_logging(config)}
    return serve.deployment(kind).options(name=name, **told)


# Keys of files and folders that may also have a word, or a name below the repository.
_BELOW_HERE = ("generation_config", "chat_template")


def resolved(value: Any, key: str = "") -> Any:
    """Arguments with the folders and files of models and adapters, and the files that keys ending
    in `_file` name, made absolute; or the value of a key among them.

    Replicas run in other working directories, where a relative path would mean something else.
    """
    if isinstance(value, Mapping):
        are_folders = key == "adapters"
        return {
            name: resolved(item, "folder" if are_folders else str(name))
            for name, item in value.items()
        }
    if not (isinstance(value, str) and value):
        return value
    if key == "model":
        return absolute(value)
    is_here = key in _BELOW_HERE and Path(value).exists()
    return str(Path(value).resolve()) if is_here or key.endswith(("_file", "folder")) else value


def names_of(document: Mapping[str, Any]) -> list[str]:
    """Return the applications' names, that of the target's first.  document: of a checked file."""
    # Nameless as Serve itself would name it, to which it may be handed later.
    return [str(each.get("name", SERVE_DEFAULT_APP_NAME)) for each in document["applications"]]


def logging_options(file: ServeFile, application: Mapping[str, Any]) -> LoggingConfig:
    """Serve's logging as the file wants it, the application's keys before the file's own."""
    wanted = serves_logging(file.config)
    wanted |= file.document.get("logging_config") or {}
    wanted |= application.get("logging_config") or {}
    try:
        return LoggingConfig(**wanted)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{file.path}: logging_config: {error}", param="logging_config"
        ) from error


def begin(file: ServeFile, *, is_own: bool) -> None:
    """Deploy the file's applications; Serve runs.

    is_own: on a Ray of this command's own, with the versions that Serve itself would give them,
    else the first `apply` would replace every process.  On another, where what runs may be of a
    former release, each process is replaced.
    """
    built = []
    for name, each in zip(names_of(file.document), file.document["applications"], strict=True):
        schema = ServeApplicationSchema(**{**each, "name": name})
        found = build_app(
            (build_pool if is_pool(each) else build)(each["args"]),
            name=name,
            route_prefix=None,
            logging_config=logging_options(file, each),
            # As `serve.run`: what the command itself was started with, of `ray job submit` say.
            default_runtime_env=schema.runtime_env or ray.get_runtime_context().runtime_env,
            external_scaler_enabled=schema.external_scaler_enabled,
        )
        for place, deployment in enumerate(found.deployments):
            told = with_options(deployment, file.deployments.get(deployment.name, {}))
            if is_own:
                told._version = get_app_code_version(schema)
            found.deployments[place] = told
        built.append(found)
    _get_global_client().deploy_applications(built, wait_for_applications_running=False)


def with_options(deployment: serve.Deployment, given: Mapping[str, Any]) -> serve.Deployment:
    """What a file says of a single deployment, over what `build` says, as `serve deploy` lays it.

    Raises ConfigError for what Serve does not take."""
    try:
        return deployment.options(**given)
    except (TypeError, ValueError) as error:
        reason = f"Ray Serve does not take it: {error}"
        raise ConfigError.at(f"deployments[{deployment.name}]", reason) from error
