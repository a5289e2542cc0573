"""Hands the applications of a file to Serve, as `serve deploy` would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.constants import SERVE_DEFAULT_APP_NAME
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.context import _get_global_client
from ray.serve.schema import LoggingConfig, ServeApplicationSchema

from cluster.config.applications import is_pool
from cluster.config.file import ServeFile
from cluster.errors import ConfigError
from deployments.app import build, build_pool, serves_logging


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
