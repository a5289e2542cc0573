"""`drafthouse diff OLD NEW`: the price of every changed key, when the new file is applied.

Ray Serve itself is asked: its own functions say which version a deployment has under a file, and
whether one version can become another without a restart.  So this stays true whatever our
applications are made of.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray._common.utils import import_attr
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve.schema import ServeApplicationSchema

from cluster.errors import ConfigError
from deployments.paths import ABSENT, Path, at, differing, live_place, name_of, shown

# Of the path of what a file says about one deployment.
_ENTRY_LEN = 4
# What Serve's controller and proxies take up while they run; the other keys beside `applications`
# are theirs from the start, and Serve warns that it ignores a change.
_LIVE_OUTSIDE = ("logging_config",)


class Price(enum.IntEnum):
    """The higher the dearer."""

    NOTHING = 0
    LIVE = 1
    NOT_UNDONE = 2
    DEPLOYMENTS = 3
    APPLICATION = 4
    SERVE = 5


@dataclass(frozen=True, slots=True, order=True)
class Cost:
    """deployments: those that pay it, of one application."""

    price: Price
    application: str = ""
    deployments: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.deployments)
        match self.price:
            case Price.NOTHING:
                return "reaches no process"
            case Price.LIVE:
                takes = "take" if len(self.deployments) > 1 else "takes"
                return f"live: {names or 'Serve itself'} {takes} it and nothing restarts"
            case Price.NOT_UNDONE:
                return f"not taken back before {names} restarts; write user_config: {{}} instead"
            case Price.DEPLOYMENTS:
                return f"restarts {names} alone"
            case Price.APPLICATION:
                return f"restarts all of application {self.application}: {names}"
        return "ignored until Serve is shut down and started anew, which restarts everything"


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The text for people.  old, new: Serve configurations that our loader has checked."""
    before, after = _Side(old), _Side(new)
    before.complete(after)
    after.complete(before)
    # What several deployments are told alike is one change.
    changes: dict[tuple[str, Price, str], set[str]] = {}
    for path in differing(before.document, after.document):
        cost = _cost(before, after, path)
        values = (shown(at(side.document, path)) for side in (before, after))
        line = f"  {name_of(path)}: " + " -> ".join(values) + _remedy(path, cost)
        changes.setdefault((line, cost.price, cost.application), set()).update(cost.deployments)
    told: dict[Cost, list[str]] = {}
    for (line, price, application), names in changes.items():
        told.setdefault(Cost(price, application, tuple(sorted(names))), []).append(line)
    if not told:
        return "the files mean the same\n"
    parts = [f"{cost}\n" + "\n".join(lines) for cost, lines in sorted(told.items(), reverse=True)]
    return "\n\n".join(parts) + "\n"


class _Side:
    """One of the two configurations, and what Serve would build of its applications."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = _keyed(document)
        self.applications: dict[str, Any] = self.document["applications"]
        self.built = {name: _built(name, each) for name, each in self.applications.items()}

    def complete(self, other: _Side) -> None:
        """Name the deployments that the other side says something about, without saying anything:
        Serve takes that as if they were not named, and their keys are compared one by one."""
        for name in self.applications.keys() & other.applications.keys():
            for deployment in other.applications[name]["deployments"]:
                self.applications[name]["deployments"].setdefault(deployment, {})


def _cost(before: _Side, after: _Side, path: Path) -> Cost:
    if path[0] != "applications":
        return Cost(Price.LIVE if path[0] in _LIVE_OUTSIDE else Price.SERVE)
    name = path[1]
    names = {each for side in (before, after) for each in side.built.get(name, ())}
    everything = Cost(Price.APPLICATION, name, tuple(sorted(names)))
    if name not in before.applications or name not in after.applications:
        return everything
    # Alone where Serve takes the key alone; else, as one that excludes another does, with all else
    # that the file says of that deployment.
    for length in (len(path), _ENTRY_LEN):
        changed = _with(
            before.applications[name], path[2:length], at(after.document, path[:length])
        )
        try:
            return _paid(name, before, changed) or everything
        except (ValueError, TypeError) as error:
            reason = str(error)
    raise ConfigError.at(name_of(path), f"Serve does not take it: {reason}")


def _paid(name: str, before: _Side, changed: Mapping[str, Any]) -> Cost | None:
    """The cost of a change within an application; None where it is built anew.

    Raises ValueError and TypeError for what Serve does not take.
    """
    schemas = [_schema(name, each) for each in (before.applications[name], changed)]
    if len({get_app_code_version(each) for each in schemas}) > 1:
        return None
    # Serve keeps what it has built, and lays what the file says about deployments over it.
    old, new = (override_deployment_info(before.built[name], each) for each in schemas)
    prices = {each: _price(old[each], new[each]) for each in sorted(old)}
    dearest = max(prices.values())
    if dearest is Price.NOTHING:
        return Cost(dearest)
    return Cost(dearest, name, tuple(each for each, price in prices.items() if price is dearest))


def _price(old: DeploymentInfo, new: DeploymentInfo) -> Price:
    """The price of a change to one deployment."""
    versions = [DeploymentTargetState.create(each, 1).version for each in (old, new)]
    if versions[0].requires_actor_restart(versions[1]):
        return Price.DEPLOYMENTS
    if versions[0].requires_actor_reconfigure(versions[1]):
        # Replicas are told of a user_config, not of its absence.
        configs = [each.deployment_config.user_config for each in (old, new)]
        return Price.NOT_UNDONE if configs[0] is not None and configs[1] is None else Price.LIVE
    options = [each.deployment_config.model_dump() for each in (old, new)]
    for each in options:
        del each["user_configured_option_names"]
    return Price.LIVE if options[0] != options[1] else Price.NOTHING


def _built(name: str, application: Mapping[str, Any]) -> dict[str, DeploymentInfo]:
    """The application's deployments as its builder makes them, by name."""
    schema = _schema(name, application)
    # In place of a handle, which would look for a Ray that runs, its deployment's name.
    built = build_app(
        import_attr(schema.import_path)(schema.args),
        name=name,
        default_runtime_env=schema.runtime_env,
        make_deployment_handle=lambda deployment, _: deployment.name,
    )
    return {
        each.name: DeploymentInfo(
            each._deployment_config,
            each._replica_config,
            start_time_ms=0,
            deployer_job_id="",
            version="",
            route_prefix="/" if each.name == built.ingress_deployment_name else None,
        )
        for each in built.deployments
    }


def _schema(name: str, application: Mapping[str, Any]) -> ServeApplicationSchema:
    deployments = application.get("deployments", {})
    listed = [{"name": key, **options} for key, options in deployments.items()]
    return ServeApplicationSchema(**{**application, "name": name, "deployments": listed})


def _keyed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which applications and their deployments are found by name."""
    result = copy.deepcopy(dict(document))
    result["applications"] = _by_name(result["applications"])
    for application in result["applications"].values():
        application["deployments"] = _by_name(application.get("deployments") or ())
    return result


def _by_name(items: Any) -> dict[str, Any]:
    return {item.pop("name", "default"): item for item in items}


def _with(application: Mapping[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of the application with that one value."""
    result = copy.deepcopy(dict(application))
    node = result
    for key in path[:-1]:
        node = node.setdefault(key, {})
    if value == ABSENT:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return result


def _remedy(path: Path, cost: Cost) -> str:
    """Return how a key that restarts an application could change live, where it could."""
    if cost.price is not Price.APPLICATION or path[2:3] != ("args",):
        return ""
    place = live_place(path[3:], cost.deployments)
    if not place.readers:
        return ""
    renamed = f", as {'.'.join(place.key)}" if path[3] in ("drafters", "target") else ""
    return f" (live in the user_config of {', '.join(place.readers)}{renamed})"
