"""Where replicas run: from `PlacementConfig` to the options of Ray Serve."""

from __future__ import annotations

import math
import os
from typing import Any

from cluster.config.applications import drafter_deployment
from cluster.config.live import COORDINATOR, INGRESS, TARGET
from cluster.config.schema import Config, PlacementConfig
from cluster.errors import ConfigError
from cluster.records import frozen

# The end of refusals of what another machine could run.
ELSEWHERE = (
    "or name the machine that it is for: `serve` has --address to join a cluster, `check` and "
    "`plan` have --gpu and --num-gpus"
)


@frozen
class Placed:
    """The replicas of one deployment.  key: of the configuration, that says where they run."""

    key: str
    placement: PlacementConfig
    replicas: int
    ranks: int = 1


def placed(config: Config) -> dict[str, Placed]:
    """Every deployment of the application, by its name."""
    target = config.target
    found = {
        name: Placed(f"{name}.placement", part.placement, part.replicas)
        for name, part in ((INGRESS, config.ingress), (COORDINATOR, config.coordinator))
    }
    found[TARGET] = Placed(
        "target.placement", target.placement, target.replicas, target.engine.tensor_parallel
    )
    for name in config.pool:
        drafter = config.drafters[name]
        found[drafter_deployment(name)] = Placed(
            f"drafters.{name}.placement", drafter.reserved, drafter.replicas
        )
    return found


def reserved(placement: PlacementConfig, ranks: int = 1) -> dict[str, float]:
    """Return what a replica of so many processes reserves, by the names that Ray has for it."""
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    found = {name: amount * ranks for name, amount in wanted.items() if amount > 0}
    if found.get("GPU", 0.0) > 1.0:  # Ray gives a part of one alone, or whole ones
        found["GPU"] = math.ceil(found["GPU"])
    return found


def replica_options(placement: PlacementConfig, ranks: int = 0) -> dict[str, Any]:
    """Serve options of a deployment whose replicas are one actor each: what that reserves, and
    which nodes will do.  ranks: of a target, all of them on one node, because every layer ends in
    an all-reduce that only one node's links carry fast enough."""
    resources = reserved(placement, max(ranks, 1))
    options: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 0.0),
        "num_gpus": resources.pop("GPU", 0.0),
        "resources": resources,
    }
    if placement.labels:
        options["label_selector"] = dict(placement.labels)
    # In an update new replicas start before old ones end: for a target there is seldom room, nor
    # for a GPU.
    surge_percent = 0 if placement.num_gpus or ranks else 100
    return {"ray_actor_options": options, "max_surge_percent": surge_percent}


def total_resources(config: Config) -> dict[str, float]:
    """Return what the whole application reserves, summed over replicas and ranks."""
    total: dict[str, float] = {}
    for each in placed(config).values():
        for name, amount in reserved(each.placement, each.ranks).items():
            total[name] = total.get(name, 0.0) + amount * each.replicas
    return total


def local_labels(config: Config) -> dict[str, str]:
    """The node labels that `config` asks for, all of which the one local node then carries."""
    labels: dict[str, str] = {}
    for each in placed(config).values():
        for key, value in each.placement.labels.items():
            if labels.setdefault(key, value) != value:
                raise ConfigError.at(
                    "placement.labels",
                    f"{key} is {labels[key]!r} here and {value!r} there, and one "
                    f"machine cannot be both; {ELSEWHERE}",
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
    if wanted > num_gpus:
        raise ConfigError.at(
            "placement",
            f"num_gpus of all replicas are {wanted:g}, this machine has {num_gpus:g}; lower them; "
            f"{ELSEWHERE}",
        )
