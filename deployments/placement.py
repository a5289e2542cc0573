"""Where replicas run: from `PlacementConfig` to the options of Ray Serve; and whether this machine
has the cores, GPUs and ports that takes."""

from __future__ import annotations

import errno
import math
import os
import socket
from argparse import ArgumentTypeError
from collections import defaultdict
from typing import Any

from cluster.config.applications import drafter_deployment
from cluster.config.doors import LOOPBACK
from cluster.config.live import COORDINATOR, INGRESS, TARGET
from cluster.config.parse import check_that
from cluster.config.schema import Config, PlacementConfig
from cluster.errors import ConfigError
from cluster.options import whole
from cluster.records import frozen

# The end of refusals of what another machine could run.
ELSEWHERE = (
    "or name the machine that it is for: `serve` has --address to join a cluster, `check` and "
    "`plan` have --gpu and --num-gpus"
)


@frozen
class Placed:
    """The replicas of one deployment.  key: of the configuration, that says where they run.  ranks:
    the processes of a replica, all on one node, because every layer of a target ends in an
    all-reduce that only one node's links carry fast enough."""

    key: str
    placement: PlacementConfig
    replicas: int
    ranks: int = 1

    @property
    def reserves(self) -> dict[str, float]:
        """What a replica reserves, by the names that Ray has for it."""
        wanted = {
            "CPU": self.placement.num_cpus,
            "GPU": self.placement.num_gpus,
            **self.placement.resources,
        }
        found = {name: amount * self.ranks for name, amount in wanted.items() if amount > 0}
        if found.get("GPU", 0.0) > 1.0:  # Ray gives a part of one alone, or whole ones
            found["GPU"] = math.ceil(found["GPU"])
        return found

    def options(self) -> dict[str, Any]:
        """Return Serve's options of the deployment, whose replicas are one actor each: how many
        there are, what each reserves, and which nodes will do."""
        resources = self.reserves
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": resources.pop("GPU", 0.0),
            "resources": resources,
        }
        if self.placement.labels:
            options["label_selector"] = dict(self.placement.labels)
        # In an update new replicas start before old ones end: for a target there is seldom room,
        # nor for a GPU.
        has_room = not self.placement.num_gpus and self.key != f"{TARGET}.placement"
        return {
            "num_replicas": self.replicas,
            "ray_actor_options": options,
            "max_surge_percent": 100 * has_room,
        }


def placed(config: Config) -> dict[str, Placed]:
    """Every deployment of the application, by its name."""
    parts = (
        (INGRESS, config.ingress, 1),
        (COORDINATOR, config.coordinator, 1),
        (TARGET, config.target, config.target.engine.tensor_parallel),
    )
    found = {
        name: Placed(f"{name}.placement", part.placement, part.replicas, ranks)
        for name, part, ranks in parts
    }
    return found | {drafter_deployment(name): placed_drafter(config, name) for name in config.pool}


def placed_drafter(config: Config, name: str) -> Placed:
    """A drafter with processes of its own."""
    drafter = config.drafters[name]
    return Placed(f"drafters.{name}.placement", drafter.reserved, drafter.replicas)


def total_resources(config: Config) -> dict[str, float]:
    """Return what the whole application reserves, summed over replicas and ranks."""
    total = defaultdict[str, float](float)
    for each in placed(config).values():
        for name, amount in each.reserves.items():
            total[name] += amount * each.replicas
    return total


def local_labels(config: Config) -> dict[str, str]:
    """The node labels that `config` asks for, all of which the one local node then carries."""
    labels: dict[str, str] = {}
    for each in placed(config).values():
        for key, value in each.placement.labels.items():
            check_that(
                labels.setdefault(key, value) == value,
                "placement.labels",
                f"{key} is {labels[key]!r} here and {value!r} there, and one machine cannot be "
                f"both; {ELSEWHERE}",
            )
    return labels


def check_cores(config: Config) -> None:
    """Raise ConfigError for a core that this machine has not, or does not let this process use."""
    there = os.sched_getaffinity(0)
    for each in placed(config).values():
        if missing := sorted({*each.placement.cores} - there):
            told = ", ".join(map(str, sorted(there)))
            reason = f"this machine gives no core {missing[0]}; name some of: {told}"
            raise ConfigError.at(f"{each.key}.cores", reason)


def check_gpus(config: Config, num_gpus: float) -> None:
    """Raise ConfigError if the application reserves more GPUs than `num_gpus`."""
    wanted = total_resources(config).get("GPU", 0.0)
    check_that(
        wanted <= num_gpus,
        "placement",
        f"num_gpus of all replicas are {wanted:g}, this machine has {num_gpus:g}; lower them; "
        f"{ELSEWHERE}",
    )


# Can our servers listen where they are to?  Asked before anything is started, so that the answer
# names a setting.

# Where Ray's own store listens, if the environment says so; where it cannot, Ray waits for ever.
_RAYS_PORT = "RAY_GCS_SERVER_PORT"


def check_free(config: Config, *, at_any_port: bool = False) -> None:
    """Raise one ConfigError for all addresses that cannot be listened at, with the remedy.

    at_any_port: only the hosts count, for what is not to start now."""
    problems = []
    taken: dict[str, int] = {}
    for section, (host, port) in config.listeners.items():
        error = why_not(host, 0 if at_any_port else port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            taken[f"{section}.port"] = port
        elif error.errno in (errno.EACCES, errno.EPERM):
            problems.append(
                f"{section}.port: this user may not listen at {port}; choose one above 1023"
            )
        else:
            problems.append(
                f"{section}.host: {host!r} is no address of this machine ({error.strerror}); "
                "use 127.0.0.1, or 0.0.0.0 for all interfaces"
            )
    if taken:
        named = ", ".join(f"{setting}: port {port}" for setting, port in taken.items())
        remedy = " ".join(f"--set {setting}=PORT" for setting in taken)
        problems.append(
            f"{named} taken by another process; end what listens there or pass {remedy}"
        )
    rays_own = os.environ.get(_RAYS_PORT)
    if rays_own and not at_any_port:
        try:
            is_free = why_not(LOOPBACK, whole(1, 65_535)(rays_own)) is None
        except ArgumentTypeError as error:
            raise ConfigError.at(_RAYS_PORT, str(error)) from error
        if not is_free:
            problems.append(
                f"{_RAYS_PORT}: port {rays_own}, Ray's own, taken by another process; end what "
                "listens there or unset it"
            )
    if problems:
        raise ConfigError("; ".join(problems), param=next(iter(taken), None))


def why_not(host: str, port: int) -> OSError | None:
    """Why a server could not listen on this address now; None if it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET6 and not _has_ipv6():
        family, host = socket.AF_INET, "0.0.0.0"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are only winding down is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
