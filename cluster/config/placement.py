"""Where the processes of a cluster run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from cluster.config.parse import NonNegativeFloat, NonNegativeInt
from cluster.records import frozen


@frozen
class PlacementConfig:
    """Where the replicas of one deployment run."""

    num_cpus: NonNegativeFloat = 0.5
    """Reserved per replica; for a target, per rank."""
    num_gpus: NonNegativeFloat = 0.0
    """Reserved per replica; for a target, per rank, and for all of them together in whole GPUs
    where that is more than one."""
    resources: Mapping[str, NonNegativeFloat] = field(default_factory=dict)
    """Custom Ray resources, reserved per replica or rank."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray node labels that the node must have, key to value."""
    cores: tuple[NonNegativeInt, ...] = ()
    """CPU cores, by number, that each of these processes is pinned to; empty = not pinned."""
