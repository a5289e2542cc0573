"""The ranks of a tensor-parallel target other than rank 0: actors in the replica's own group."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config.addresses import LOOPBACK, free_port
from cluster.config.schema import Config
from cluster.errors import WorkerError
from cluster.worker.build import follow_target
from deployments.placement import actor_options
from deployments.replica import configure_logging, where

T = TypeVar("T")
_NUM_LOOKS = 4
# By rank, the GPUs that it has reserved, as CUDA_VISIBLE_DEVICES names them.
GpusOfRanks = tuple[tuple[str, ...], ...]


class RankActor:
    """One process of the group: it repeats what rank 0 does until rank 0 closes its engine."""

    async def follow(self, config: Config, rank: int, address: str, gpus: GpusOfRanks) -> None:
        """Join the group at rank 0's `address`, load, and follow; returns when it is over."""
        configure_logging(config.log_format)
        index = show_gpus(gpus, rank, os.environ)  # before torch looks for GPUs
        await asyncio.to_thread(follow_target, config, rank, address, index)

    async def where(self) -> dict[str, Any]:
        return where()


def show_gpus(gpus: GpusOfRanks, rank: int, environment: MutableMapping[str, str]) -> int | None:
    """Let a rank see the GPUs of all ranks, on each in the same order; returns its own's index.

    Ray shows each actor only what it reserved.  NCCL has faults where ranks of a node do not see
    each other's GPUs, and memory that they share needs it.  None = by rank, for ranks that reserve
    no GPU and see all.
    """
    # All on one node, they talk over loopback: none of them asks who calls.
    for library in ("GLOO", "NCCL"):
        environment.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if not all(gpus):
        return None
    visible = list(dict.fromkeys(each for own in gpus for each in own))
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return visible.index(gpus[rank][0])


async def unless_over(work: Awaitable[T], ranks: Sequence[Future[Any]]) -> T:
    """What `work` gives; WorkerError as soon as a rank ends before that, with its reason.

    Whoever waits for a rank inside a collective would otherwise wait for as long as loading may
    take."""
    task = asyncio.ensure_future(work)
    others = [asyncio.wrap_future(each) for each in ranks]
    for each in others:
        # They may end much later, when nobody asks.
        each.add_done_callback(lambda over: over.cancelled() or over.exception())
    try:
        await asyncio.wait([task, *others], return_when=FIRST_COMPLETED)
        for rank, following in enumerate(ranks, start=1):
            if following.done() and not task.done():
                lines = str(following.exception() or "").strip().splitlines()
                reason = f": {lines[-1]}" if lines else ""
                raise WorkerError(
                    f"rank {rank} of the target has ended{reason}; the replica must be replaced"
                )
        return await task
    finally:
        task.cancel()


async def hear(rank: int, ask: Callable[[], Awaitable[Any]], silence_s: float) -> None:
    """Raise WorkerError when a rank has not answered `ask` for so long.

    Looks are counted, not time: who was stopped itself has heard nobody meanwhile."""
    num_missed, answer = 0, asyncio.ensure_future(ask())
    while num_missed < _NUM_LOOKS:
        await asyncio.sleep(silence_s / _NUM_LOOKS)
        num_missed += 1
        if answer.done():
            num_missed = num_missed if answer.exception() else 0
            answer = asyncio.ensure_future(ask())
    answer.cancel()
    raise WorkerError(f"rank {rank} of the target has said nothing for {silence_s:g} s")


class FollowerRanks:
    """Ranks 1 and up of this replica's target; empty when it has no tensor parallelism."""

    def __init__(self, config: Config) -> None:
        """Start the actors in the bundles after the replica's own."""
        self._config = config
        self.address = f"{LOOPBACK}:{free_port()}"
        self._actors = [
            self._start(rank) for rank in range(1, config.target.engine.tensor_parallel)
        ]
        self.following: list[Future[Any]] = []

    async def begin(self) -> GpusOfRanks:
        """Let them load and wait for rank 0; returns the GPUs that each rank has reserved."""
        places = [where(), *await self.where()]
        gpus = tuple(tuple(place["gpu_ids"]) for place in places)
        self.following = [
            actor.follow.remote(self._config, rank, self.address, gpus).future()
            for rank, actor in enumerate(self._actors, start=1)
        ]
        return gpus

    def _start(self, rank: int) -> Any:
        # The group's bundles select the node; the actor asks for what its bundle holds.
        placement = dataclasses.replace(self._config.target.placement, labels={})
        strategy = PlacementGroupSchedulingStrategy(
            get_current_placement_group(), placement_group_bundle_index=rank
        )
        return (
            ray.remote(RankActor)
            .options(**actor_options(placement), scheduling_strategy=strategy, max_concurrency=4)
            .remote()
        )

    async def watch(self, silence_s: float) -> None:
        """Raise WorkerError when a rank has ended, or has said nothing for so long."""
        heard = (
            hear(rank, actor.where.remote, silence_s)
            for rank, actor in enumerate(self._actors, start=1)
        )
        await unless_over(asyncio.gather(*heard), self.following)

    async def where(self) -> list[dict[str, Any]]:
        """Node and devices of ranks 1 and up."""
        return list(await asyncio.gather(*(actor.where.remote() for actor in self._actors)))

    def stop(self) -> None:
        """End the rank processes."""
        for actor in self._actors:
            ray.kill(actor)
