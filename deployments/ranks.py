"""The ranks of a tensor-parallel target other than rank 0: actors in the replica's own group."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from typing import Any

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import TargetConfig
from cluster.errors import WorkerError
from cluster.worker.priority import pin_to_cores
from deployments.addresses import LOOPBACK
from deployments.placement import actor_options
from deployments.replica import where


class RankActor:
    """One process of the group: it repeats what rank 0 does until rank 0 closes its engine."""

    async def follow(self, target: TargetConfig, rank: int, address: str) -> None:
        """Join the group at rank 0's `address`, load, and follow; returns when it is over."""
        await asyncio.to_thread(_follow, target, rank, address)

    async def where(self) -> dict[str, Any]:
        return where()


def _follow(target: TargetConfig, rank: int, address: str) -> None:
    from cluster.engine.cpu.threads import configure_threads
    from cluster.engine.engine import Engine
    from cluster.engine.parallel import init_rank, leave_group

    config = target.engine
    pin_to_cores(target.placement.cores)
    configure_threads(config)
    stay_on_this_node()
    init_rank(rank, config.tensor_parallel, address, local_rank=local_rank())
    try:
        Engine.load(config).follow()
    finally:
        leave_group()


def stay_on_this_node() -> None:
    """Let the group's ranks, all on one node, talk over loopback: none of them asks who calls."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def local_rank() -> int | None:
    """This process's GPU: the first that it sees, where Ray shows it only the one it reserved.

    None = by rank, for processes that reserve none and see all.
    """
    import torch

    return 0 if torch.cuda.device_count() == 1 else None


class RankGroup:
    """Ranks 1 and up of this replica's target; empty when it has no tensor parallelism."""

    def __init__(self, config: TargetConfig) -> None:
        """Start the actors in the bundles after the replica's own.  They wait for rank 0."""
        self._config = config
        self.address = f"{LOOPBACK}:{_free_port()}"
        self._actors = [self._start(rank) for rank in range(1, config.engine.tensor_parallel)]
        self._following = [
            actor.follow.remote(config, rank, self.address).future()
            for rank, actor in enumerate(self._actors, start=1)
        ]

    def _start(self, rank: int) -> Any:
        # The group's bundles select the node; the actor asks for what its bundle holds.
        placement = dataclasses.replace(self._config.placement, labels={})
        strategy = PlacementGroupSchedulingStrategy(
            get_current_placement_group(), placement_group_bundle_index=rank
        )
        return (
            ray.remote(RankActor)
            .options(**actor_options(placement), scheduling_strategy=strategy, max_concurrency=4)
            .remote()
        )

    def check(self) -> None:
        """Raise WorkerError when a rank has ended."""
        if any(following.done() for following in self._following):
            raise WorkerError("a tensor-parallel rank has ended; the replica must be replaced")

    async def where(self) -> list[dict[str, Any]]:
        """Node and devices of ranks 1 and up."""
        return list(await asyncio.gather(*(actor.where.remote() for actor in self._actors)))

    def stop(self) -> None:
        """End the rank processes."""
        for actor in self._actors:
            ray.kill(actor)


def _free_port() -> int:
    """A port of this node that nobody uses now; torch's rendezvous binds it a moment later."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
