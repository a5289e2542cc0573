"""Keys of a Serve configuration by their paths: what differs, and what can change live."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from cluster.config.applications import drafter_deployment, is_pool, parse_pool
from cluster.config.file import parse_arguments
from cluster.config.live import COORDINATOR, INGRESS, OF_A_DRAFTER, READ_BY, TARGET
from cluster.records import frozen

Path = tuple[str, ...]

ABSENT = "(absent)"
_MAX_VALUE_LEN = 60


def differing(old: Any, new: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of all values that differ, as deep as both sides have mappings."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        if old != new:
            yield path
        return
    for key in (*old, *(key for key in new if key not in old)):
        yield from differing(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))


def at(node: Any, path: Path) -> Any:
    """Return what stands there, or ABSENT."""
    for key in path:
        node = node.get(key, ABSENT) if isinstance(node, Mapping) else ABSENT
    return node


def keyed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a Serve configuration in which applications and their deployments are found by
    name."""
    result = copy.deepcopy(dict(document))
    result["applications"] = _by_name(result["applications"])
    for application in result["applications"].values():
        # Serve has null for what is not set.
        application["deployments"] = {
            name: {key: value for key, value in options.items() if value is not None}
            for name, options in _by_name(application.get("deployments") or ()).items()
        }
    return result


def _by_name(items: Any) -> dict[str, Any]:
    return {item.pop("name", "default"): item for item in items}


def name_of(path: Path) -> str:
    """As `--set` names keys of ours; others with the place where they stand."""
    match path:
        case ("applications", _, "args", *rest) if rest:
            return ".".join(rest)
        case ("applications", _, "deployments", _, "user_config", *rest):
            return ".".join(("user_config", *rest))  # whose it is, its price says
        case ("applications", _, "deployments", name, *rest):
            return ".".join((f"deployments[{name}]", *rest))
        case ("applications", name, *rest):
            return ".".join((f"applications[{name}]", *rest))
    return ".".join(path)


def deployments_of(application: Mapping[str, Any]) -> list[str]:
    """Return the names of an application's deployments."""
    if is_pool(application):
        return [*map(drafter_deployment, parse_pool(application["args"]).on_their_own)]
    config = parse_arguments(application["args"])
    own = (name for name in config.pool if name not in config.elsewhere)
    return [INGRESS, COORDINATOR, TARGET, *map(drafter_deployment, own)]


@frozen
class LivePlace:
    """Where a key of `args` can change live: the deployments that read it, none where it cannot;
    key: its path in their user_config; source: in `args`, of all that is told together."""

    readers: tuple[str, ...] = ()
    key: Path = ()
    source: Path = ()


def live_place(path: Path, deployments: Collection[str]) -> LivePlace:
    """Where a key of `args` can change live.

    path: below `args`.  deployments: of the application."""
    match path:
        case ("target", "engine", "adapters", *_):
            return LivePlace((TARGET,), ("adapters",), path[:3])
        case ("drafters", name, option, *_) if option in OF_A_DRAFTER:
            deployment = drafter_deployment(name)
            if deployment in deployments:
                return LivePlace((deployment,), (option,), path[:3])
            is_inside = option == "options" and TARGET in deployments
            return LivePlace((TARGET,), path[:3], path[:3]) if is_inside else LivePlace()
    for known, readers in READ_BY.items():
        if f"{'.'.join(path)}.".startswith(f"{known}.") and known != "drafters":
            key = tuple(known.split("."))
            return LivePlace(readers, key, key)
    return LivePlace()


def shown(value: Any) -> str:
    """Return a value as a line of a report has it."""
    if value == ABSENT:
        return ABSENT
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    text = text.removesuffix("...").strip()
    return text if len(text) <= _MAX_VALUE_LEN else f"{text[:_MAX_VALUE_LEN]}..."
