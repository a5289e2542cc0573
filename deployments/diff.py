"""`drafthouse diff OLD NEW`: the price of every changed key, when the new file is applied.

What Ray Serve does about a change of its own keys stands here; a test asks Serve itself.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import yaml
from ray import serve

from deployments.app import with_options
from deployments.applied import (
    ABSENT,
    Path,
    at,
    deployments_in,
    differing,
    keyed,
    live_place,
    name_of,
)

_MAX_VALUE_LEN = 60
Applications = dict[str, dict[str, Any]]


class Price(enum.Enum):
    """What is said of a change, the dearest last."""

    NOTHING = "reaches no process"
    LIVE = "live: {names} {takes} it and nothing restarts"
    NOT_UNDONE = "not taken back before {names} restarts; write user_config: {{}} instead"
    APPLICATION = "restarts all of application {application}: {names}"


# Keys in an application that reach no process.  All others there are a part of its version.
INSIDE = ("route_prefix", "logging_config", "external_scaler_enabled")
_PRICES = list(Price)


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
        changes[_PRICES.index(price), application, line] |= names
    told = defaultdict[tuple[int, str, tuple[str, ...]], list[str]](list)
    for (place, application, line), found in changes.items():
        told[place, application, tuple(sorted(found))].append(line)
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


def _said(place: int, application: str, names: tuple[str, ...]) -> str:
    takes = "take" if len(names) > 1 else "takes"
    named = ", ".join(names) or "Serve itself"
    return _PRICES[place].value.format(names=named, takes=takes, application=application)


def _cost(before: Applications, after: Applications, path: Path) -> tuple[Price, set[str]]:
    """The price of the change at a path, and the deployments that pay it."""
    match path:
        case ("applications", _, "deployments", name, "user_config"):
            is_gone = at(after, path[1:]) == ABSENT
            return Price.NOT_UNDONE if is_gone else Price.LIVE, {name}
        # The first autoscaling, and its policy, are a part of the application's version.
        case ("applications", _, "deployments", name, key, *rest) if (
            key != "autoscaling_config" or rest[:1] not in ([], ["policy"])
        ):
            return Price.LIVE, {name}
        case ("applications", _, key, *_) if key in INSIDE:
            return Price.NOTHING, set()
        case ("applications", name, *_):
            names = {
                each
                for side in (before, after)
                if name in side
                for each in deployments_in(side[name])
            }
            return Price.APPLICATION, names
        case ("logging_config", *_):
            return Price.LIVE, set()
    return Price.NOTHING, set()


def _checked(document: Mapping[str, Any]) -> dict[str, Any]:
    """`keyed`; raises ConfigError for what Serve does not take of a deployment."""
    result = keyed(document)
    for application in result["applications"].values():
        for name, options in application["deployments"].items():
            with_options(serve.deployment(_checked, name=name), options)
    return result


def _remedy(path: Path, price: Price, deployments: set[str]) -> str:
    """Return how a key that restarts an application could change live, where it could."""
    if price is not Price.APPLICATION or path[2:3] != ("args",):
        return ""
    place = live_place(path[3:], deployments)
    if place is None:
        return ""
    renamed = f", as {'.'.join(place.key)}" if path[3] in ("drafters", "target") else ""
    return f" (live in the user_config of {', '.join(place.readers)}{renamed})"
