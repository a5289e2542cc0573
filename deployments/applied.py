"""`drafthouse apply`: a running server takes the keys of a file that can change while it serves.

The server keeps the arguments that it was started with, and so its processes; what differs now is
told to the deployments that read it, as their `user_config`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cluster.config.file import ServeFile, load
from cluster.errors import ConfigError, WorkerError
from deployments.paths import ABSENT, at, deployments_of, differing, keyed, live_place, name_of
from deployments.processes import announced
from deployments.ray_environment import prepare_to_start, use_token


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
        names = deployments_of(own)
        for name in names:
            # Replicas are not told that a user_config has gone.
            entry = told.setdefault(name, {"name": name})
            entry["user_config"] = copy.deepcopy(entry.get("user_config") or {})
        # A section that is new differs key by key.
        sections: dict[str, Any] = {
            key: {} for key, each in own["args"].items() if isinstance(each, Mapping)
        }
        for path in differing(sections | former["args"], own["args"]):
            place = live_place(path, names)
            value = at(own["args"], place.source)
            if not place.readers or value == ABSENT:
                stuck.append(".".join(path))
                continue
            for reader in place.readers:
                node = told[reader]["user_config"]
                for key in place.key[:-1]:
                    node = node.setdefault(key, {})
                node[place.key[-1]] = value
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
