"""The GPUs that a plan is for: this machine's, or those of a kind that need not be here."""

from __future__ import annotations

import argparse
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from cluster.config.parse import check_known
from cluster.config.schema import Config
from cluster.errors import ConfigError
from cluster.records import frozen
from deployments.placement import total_resources


@frozen
class Gpus:
    """GPUs of one kind.  memory: bytes of each; bandwidth: bytes/s of that; 0 = not known.  source:
    where both are from."""

    kind: str
    count: int
    memory: int = 0
    bandwidth: float = 0.0
    source: str = ""


def asked(config: Config, arguments: argparse.Namespace) -> Gpus | None:
    """Return the GPUs that the options name, None without any.

    Raises ConfigError for a kind that is not known, and where they are too few."""
    least = max(needed_by(config), 1)
    count = least if arguments.num_gpus is None else arguments.num_gpus
    if arguments.gpu is None:
        if arguments.num_gpus is not None:
            raise ConfigError("--num-gpus: of which kind? name it with --gpu")
        return None
    all_known, kind = known(), _plain(arguments.gpu)
    kind = next((each for each in all_known if _plain(each) == kind), kind)
    check_known(kind, all_known, "--gpu", f"{arguments.gpu!r} is not known", "kinds")
    if config.target.engine.device == "cpu":
        raise ConfigError("--gpu: target.engine.device is cpu, which uses none; leave one out")
    if count < least:
        raise ConfigError(
            f"--num-gpus: {count} are too few, the configuration needs {least}; name more,"
            " or lower target.engine.tensor_parallel or the num_gpus of placements"
        )
    found = all_known[kind]
    memory, bandwidth = int(found["memory_gb"] * 1e9), float(found["gb_per_s"] * 1e9)
    return Gpus(kind, count, memory, bandwidth, f"{found['maker']}'s data sheet")


def planned_for(config: Config, arguments: argparse.Namespace) -> Gpus | None:
    """Return the GPUs of a plan: those that are asked for, else this machine's; of an unknown kind
    where there is none, and the configuration needs some; None = it is for this CPU."""
    import torch

    named = asked(config, arguments)
    if named is not None or config.target.engine.device == "cpu":
        return named
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        return Gpus(here.name, torch.cuda.device_count(), here.total_memory, 0.0, "measured here")
    needed = needed_by(config)
    return Gpus("", needed) if needed else None


def needed_by(config: Config) -> int:
    """Return the GPUs without which the configuration cannot be served as it stands."""
    engine = config.target.engine
    if engine.device == "cpu":
        return 0
    ranks = engine.tensor_parallel * config.target.replicas if engine.tensor_parallel > 1 else 0
    is_named = engine.device.startswith("cuda")
    return max(math.ceil(total_resources(config).get("GPU", 0.0)), ranks, int(is_named))


def of_rank(config: Config, drafter: str) -> int:
    """Return the GPUs of one rank of a drafter's engine, "" = the target's: those reserved for one
    whose layers a device map spreads, else one."""
    is_spread = not drafter and config.target.engine.device_map is not None
    return max(1, int(config.target.placement.num_gpus)) if is_spread else 1


def _plain(kind: str) -> str:
    """As people write it: "RTX 4090" and "rtx-4090" are one."""
    return "".join(filter(str.isalnum, kind.lower()))


@cache
def known() -> dict[str, dict[str, Any]]:
    """What makers state of their GPUs, by kind: memory and its bandwidth, as in data sheets."""
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
