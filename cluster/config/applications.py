"""The applications of a file: the target's, and one of drafters alone where there is one.

They restart apart from each other: an edit of the drafters' never touches a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from cluster.config.live import COORDINATOR, INGRESS, TARGET, changed, changed_drafter, check_told
from cluster.config.parse import check_keys, check_known, check_that, mapping, parse
from cluster.config.references import check, check_drafters
from cluster.config.schema import Config
from cluster.errors import ConfigError

# The policy of an autoscaled deployment that knows what its replicas have to do.
POLICY = "deployments.autoscaling:ByStatistics"

# Before the name of a drafter in that of its deployment.
_DRAFTER = "drafter-"

# How the import path of an application of drafters alone ends.
_OF_A_POOL = ":build_pool"
# The keys of its arguments: its drafters, and what of the target's must be the same here.
SHARED = ("network", "data_plane", "coordinator.max_frame_bytes", "log_format")

_DEPLOYMENT_KEYS = (
    "name",
    "user_config",
    "num_replicas",
    "autoscaling_config",
    "max_surge_percent",
)

# What a file says of single deployments, by their names.
Overrides = dict[str, Mapping[str, Any]]


def drafter_deployment(name: str) -> str:
    """Return the name of the deployment of a drafter with a process of its own."""
    return _DRAFTER + name


def is_pool(application: Mapping[str, Any]) -> bool:
    """True if the application has drafters alone."""
    return str(application.get("import_path")).endswith(_OF_A_POOL)


def is_shared(key: str) -> bool:
    """True if the key, or all below it, must be the same in all applications."""
    return any(f"{key}.".startswith(f"{each}.") for each in SHARED)


def parse_pool(arguments: Mapping[str, Any]) -> Config:
    """Return the `args` of an application of drafters, as Serve hands them to its builder."""
    check_keys(arguments, ("drafters", *(key.partition(".")[0] for key in SHARED)))
    check_keys(mapping(arguments.get("coordinator")), ("max_frame_bytes",), "coordinator")
    config = parse(Config, arguments)
    check_drafters(config)
    check_that(
        config.on_their_own, "drafters", "there is none; name one, or remove the application"
    )
    for name in config.on_their_own:
        drafter = config.drafters[name]
        for key, is_said in (
            ("placement.with", drafter.is_hosted),
            ("placement.application", drafter.application),
            ("shadow", drafter.shadow),
            ("rollout", drafter.rollout is not None),
        ):
            check_that(
                not is_said,
                f"drafters.{name}.{key}",
                "this is an application of drafters alone; remove it here (shadow and rollout are "
                "said beside the target)",
            )
    return config


def deployments_of(config: Config, application: Mapping[str, Any]) -> list[str]:
    """Return the names of an application's deployments.  config: of its arguments."""
    if is_pool(application):
        return [*map(drafter_deployment, config.on_their_own)]
    own = (name for name in config.pool if name not in config.elsewhere)
    return [INGRESS, COORDINATOR, TARGET, *map(drafter_deployment, own)]


def with_deployments(
    config: Config, application: Mapping[str, Any], place: str
) -> tuple[Config, Overrides]:
    """Return `config`, of an application's arguments, with the user_configs of its deployments, and
    all that the file says of these, in its order."""
    path = f"{place}.deployments"
    listed = application.get("deployments") or []
    check_that(isinstance(listed, list), path, "a list of deployments is expected")
    known = deployments_of(config, application)
    overrides: Overrides = {}
    told: dict[str, Any] = {}
    for number, each in enumerate(listed):
        where = f"{path}[{number}]"
        with ConfigError.below(where):
            options = dict(mapping(each))
            check_keys(options, _DEPLOYMENT_KEYS)
            name = str(options.pop("name", ""))
            check_known(name, known, "name", f"{name!r} is no deployment", "deployments")
            check_that(name not in overrides, "name", f"{name!r} stands twice; name it once")
            if not application.get("autoscaling_policy"):
                _check_scaled(name, options.get("autoscaling_config"))
        overrides[name] = options
        given = options.get("user_config")
        if name in (INGRESS, COORDINATOR, TARGET):
            config = changed(config, given, f"{where}.user_config")
            told[name] = given
        else:
            drafter = name.removeprefix(_DRAFTER)
            config = changed_drafter(config, drafter, given, f"{where}.user_config")
    check_told(told, path)
    num_replicas = overrides.get(INGRESS, {}).get("num_replicas", config.ingress.replicas)
    check_that(
        num_replicas == config.ingress.replicas,
        path,
        f"{num_replicas} replicas of {INGRESS} share what keys may have by their number, and "
        f"ingress.replicas is {config.ingress.replicas}; set both, the latter in its user_config",
    )
    return config, overrides


def with_pool(
    config: Config, application: Mapping[str, Any], place: str
) -> tuple[Config, Overrides]:
    """Return `config` with the drafters that another application has, as that says of them, and all
    that the file says of its deployments."""
    with ConfigError.below(f"{place}.args"):
        pool = parse_pool(application["args"])
        for key in SHARED:
            value_in = attrgetter(key)
            check_that(
                value_in(config) == value_in(pool),
                key,
                "it must be as in the target's application; write it once, as a YAML anchor",
            )
    check_that(
        application.get("route_prefix", "/") is None,
        f"{place}.route_prefix",
        "drafters answer no HTTP; write `route_prefix: null`",
    )
    app_name = str(application.get("name"))
    named = [name for name, where in config.elsewhere.items() if where == app_name]
    for name in pool.on_their_own:
        check_that(
            name in named,
            f"{place}.args.drafters.{name}",
            f"nobody would ask it; add `placement: {{application: {app_name}}}` below "
            f"drafters.{name} of the target's application",
        )
    for name in named:
        check_known(
            name,
            pool.on_their_own,
            f"drafters.{name}.placement.application",
            f"application {app_name} has no drafter {name!r}",
            "it has",
        )
    pool, overrides = with_deployments(pool, application, place)
    return _joined(config, pool), overrides


def _joined(config: Config, pool: Config) -> Config:
    drafters = dict(config.drafters)
    for name, drafter in pool.drafters.items():
        former = config.drafters.get(name)
        if former is not None:
            path, said, kind = f"drafters.{name}", former.kind, drafter.kind
            check_that(name not in pool.stage_of, path, "two drafters have this name; change one")
            # The target's application would take it for another.
            check_that(
                said == kind or (not said and kind != "prediction"),
                f"{path}.kind",
                f"{said!r} here and {kind!r} in its own application; say so",
            )
            drafter = replace(
                drafter,
                shadow=former.shadow,
                rollout=former.rollout,
                placement=drafter.reserved,
            )
        drafters[name] = drafter
    result = replace(config, drafters=drafters)
    check(result)
    return result


def _check_scaled(name: str, autoscaling: Any) -> None:
    """Raise ConfigError for autoscaling that would not see the load, or that nobody counts with."""
    if autoscaling is None:
        return
    with ConfigError.below("autoscaling_config"):
        check_that(
            name != INGRESS,
            "",
            "its replicas share what keys may have by their number; set num_replicas instead",
        )
        policy = mapping(mapping(autoscaling).get("policy"), "policy")
        check_that(
            policy.get("policy_function"),
            "policy.policy_function",
            "Ray Serve's own policy counts the calls that pass through Serve, and texts do not; "
            f"set it to {POLICY}",
        )
