"""`drafthouse apply`: a running server takes the keys of a file that can change while it serves;
and `drafthouse diff`: what each change of a file costs.

The server keeps the arguments that it was started with, and so its processes; what differs now is
told to the deployments that read it, as their `user_config`.  Keys are named by their paths.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml

from cluster.config.applications import deployments_of, drafter_deployment, is_pool, parse_pool
from cluster.config.file import ServeFile, load, parse_arguments, set_at
from cluster.config.live import OF_A_DRAFTER, READ_BY, TARGET
from cluster.errors import ConfigError, WorkerError
from cluster.records import frozen
from deployments.ray_environment import prepare_to_start, use_token
from deployments.supervisor import announced

Path = tuple[str, ...]

ABSENT = "(absent)"


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


def deployments_in(application: Mapping[str, Any]) -> list[str]:
    """Return the names of an application's deployments."""
    read = parse_pool if is_pool(application) else parse_arguments
    return deployments_of(read(application["args"]), application)


@frozen
class LivePlace:
    """Where a key of `args` can change live: the deployments that read it; key: its path in their
    user_config; source: in `args`, of all that is told together."""

    readers: tuple[str, ...]
    key: Path
    source: Path


def live_place(path: Path, deployments: Collection[str]) -> LivePlace | None:
    """Where a key of `args` can change live; None where it cannot.

    path: below `args`.  deployments: of the application."""
    match path:
        case ("target", "engine", "adapters", *_):
            return LivePlace((TARGET,), ("adapters",), path[:3])
        case ("drafters", name, option, *_) if option in OF_A_DRAFTER:
            deployment = drafter_deployment(name)
            if deployment in deployments:
                return LivePlace((deployment,), (option,), path[:3])
            is_inside = option == "options" and TARGET in deployments
            return LivePlace((TARGET,), path[:3], path[:3]) if is_inside else None
    for known, readers in READ_BY.items():
        if f"{'.'.join(path)}.".startswith(f"{known}.") and known != "drafters":
            key = tuple(known.split("."))
            return LivePlace(readers, key, key)
    return None


def apply(file: ServeFile) -> str:
    """Apply `file` to the server of this machine that listens at its HTTP port; returns what the
    command prints.

    Raises ConfigError where there is none, or where a key cannot change while it serves, and
    WorkerError for what a part does not take.
    """
    found = announced(file.config.http.port)
    document = live_document(found["document"], file)
    use_token(found["token"])
    prepare_to_start(file.config)
    # Only now: Ray reads its environment once.
    from deployments.serve_command import change

    if refused := change(found["address"], document):
        raise WorkerError("; ".join(refused))
    return f"{file.path} is applied, and nothing restarts\n"


def live_document(served: Mapping[str, Any], file: ServeFile) -> dict[str, Any]:
    """The document that was served first, with what `file` says now told to who reads it.

    Raises ConfigError for what cannot change without a restart."""
    result = copy.deepcopy(dict(file.document))
    stuck = []
    for own, former in zip(result["applications"], served["applications"], strict=False):
        told = {each["name"]: dict(each) for each in own.get("deployments") or ()}
        names = deployments_in(own)
        for name in names:
            # Replicas are not told that a user_config has gone.
            entry = told.setdefault(name, {"name": name})
            entry["user_config"] = dict(entry.get("user_config") or {})
        # A section that is new differs key by key.
        sections: dict[str, Any] = {
            key: {} for key, each in own["args"].items() if isinstance(each, Mapping)
        }
        for path in differing(sections | former["args"], own["args"]):
            place = live_place(path, names)
            value = at(own["args"], place.source) if place else ABSENT
            if place is None or value == ABSENT:
                stuck.append(".".join(path))
                continue
            for reader in place.readers:
                set_at(told[reader]["user_config"], place.key, value)
        own |= {"args": former["args"], "deployments": list(told.values())}
    # What is told to single deployments is what changes now.
    outside = differing(keyed(served), keyed(result))
    stuck += [name_of(path) for path in outside if path[2:3] != ("deployments",)]
    if stuck:
        raise ConfigError(
            f"{file.path}: {', '.join(stuck)}: what was served before is kept, for this changes at "
            "a restart alone; stop the server and serve the file"
        )
    if load(file.path, document=copy.deepcopy(result)).config != file.config:
        raise ConfigError(
            f"{file.path}: a key that is left out now goes back to its default at a restart alone; "
            "write its value"
        )
    return result


# `drafthouse diff OLD NEW`: the price of every changed key, when the new file is applied.
#
# What Ray Serve does about a change of its own keys stands here; a test asks Serve itself.

_MAX_VALUE_LEN = 60
Applications = dict[str, dict[str, Any]]

# What is said of a change, the dearest last.
PRICES = (
    "reaches no process",
    "live: {names} {takes} it and nothing restarts",
    "not taken back before {names} restarts; write user_config: {{}} instead",
    "restarts all of application {application}: {names}",
)
NOTHING, LIVE, NOT_UNDONE, APPLICATION = range(len(PRICES))

# Keys in an application that reach no process.  All others there are a part of its version.
INSIDE = ("route_prefix", "logging_config", "external_scaler_enabled")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The text for people.  old, new: Serve configurations that our loader has checked."""
    before, after = _checked(old), _checked(new)
    for name in before["applications"].keys() & after["applications"].keys():
        sides = [side["applications"][name]["deployments"] for side in (before, after)]
        for each in sides[0].keys() | sides[1].keys():  # to name one says nothing yet
            for side in sides:
                side.setdefault(each, {})
    # What several deployments are told alike is one change.
    changes = defaultdict[tuple[int, str, str], set[str]](set)
    for path in differing(before, after):
        price, names = _cost(before["applications"], after["applications"], path)
        values = " -> ".join(_shown(at(side, path)) for side in (before, after))
        line = f"  {name_of(path)}: {values}{_remedy(path, price, names)}"
        application = path[1] if path[0] == "applications" else ""
        changes[price, application, line] |= names
    told = defaultdict[tuple[int, str, tuple[str, ...]], list[str]](list)
    for (price, application, line), found in changes.items():
        told[price, application, tuple(sorted(found))].append(line)
    parts = [
        "\n".join([_said(*cost), *lines]) for cost, lines in sorted(told.items(), reverse=True)
    ]
    return "\n\n".join(parts or ["the files mean the same"]) + "\n"


def _shown(value: Any) -> str:
    """Return a value as a line of a report has it."""
    if value == ABSENT:
        return ABSENT
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    text = text.removesuffix("...").strip()
    return text if len(text) <= _MAX_VALUE_LEN else f"{text[:_MAX_VALUE_LEN]}..."


def _said(price: int, application: str, names: tuple[str, ...]) -> str:
    takes = "take" if len(names) > 1 else "takes"
    named = ", ".join(names) or "Serve itself"
    return PRICES[price].format(names=named, takes=takes, application=application)


def _cost(before: Applications, after: Applications, path: Path) -> tuple[int, set[str]]:
    """The price of the change at a path, and the deployments that pay it."""
    match path:
        case ("applications", _, "deployments", name, "user_config"):
            is_gone = at(after, path[1:]) == ABSENT
            return NOT_UNDONE if is_gone else LIVE, {name}
        # The first autoscaling, and its policy, are a part of the application's version.
        case ("applications", _, "deployments", name, key, *rest) if (
            key != "autoscaling_config" or rest[:1] not in ([], ["policy"])
        ):
            return LIVE, {name}
        case ("applications", _, key, *_) if key in INSIDE:
            return NOTHING, set()
        case ("applications", name, *_):
            names = {
                each
                for side in (before, after)
                if name in side
                for each in deployments_in(side[name])
            }
            return APPLICATION, names
        case ("logging_config", *_):
            return LIVE, set()
    return NOTHING, set()


def _checked(document: Mapping[str, Any]) -> dict[str, Any]:
    """`keyed`; raises ConfigError for what Serve does not take of a deployment."""
    # Not for `apply`, which has to prepare Ray's environment first.
    from ray import serve

    from deployments.app import with_options

    result = keyed(document)
    for application in result["applications"].values():
        for name, options in application["deployments"].items():
            with_options(serve.deployment(_checked, name=name), options)
    return result


def _remedy(path: Path, price: int, deployments: set[str]) -> str:
    """Return how a key that restarts an application could change live, where it could."""
    if price != APPLICATION or path[2:3] != ("args",):
        return ""
    place = live_place(path[3:], deployments)
    if place is None:
        return ""
    renamed = f", as {'.'.join(place.key)}" if path[3] in ("drafters", "target") else ""
    return f" (live in the user_config of {', '.join(place.readers)}{renamed})"
