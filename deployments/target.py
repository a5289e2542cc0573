"""The target as a Ray Serve deployment: rank 0 in the replica, the other ranks beside it."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.config.live import changed
from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.rpc.server import serve_target
from cluster.worker.build import build_target, load_target
from cluster.worker.priority import freeze_gc, shorten_switch_interval
from deployments import learned
from deployments.exporter import Exporter
from deployments.ranks import FollowerRanks, GpusOfRanks, show_gpus, stay_on_this_node, unless_over
from deployments.replica import (
    WorkerReplica,
    configure_logging,
    process_id,
    told_at_start,
    where,
)

if TYPE_CHECKING:
    from cluster.engine.engine import Engine


log = logging.getLogger(__name__)


class TargetDeployment(WorkerReplica):
    """One target replica: its engine in a thread, and a gRPC server for the coordinators."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_logging(config.log_format)
        self._config = config
        self._changing = asyncio.Lock()
        self._ranks = FollowerRanks(config)
        # Loading takes from seconds to minutes, measuring some seconds, and Serve asks for
        # the state meanwhile.
        gpus = await self._ranks.begin()
        config = _with_told_drafters(config)
        loading = asyncio.to_thread(_load, config, self._ranks.address, gpus)
        self._engine = await unless_over(loading, self._ranks.following)
        self._worker = await asyncio.to_thread(
            build_target, self._engine, config, process_id("target")
        )
        freeze_gc()
        if config.residents:
            shorten_switch_interval()
        described = self._worker.describe()
        self._keeping = learned.keep(self._config, described, "target", self._worker)
        self._worker.start()
        exporter = Exporter(self._worker.recorder)
        self._exporting = asyncio.create_task(exporter.run_forever())
        if config.target.engine.tensor_parallel > 1:
            self._watching = asyncio.create_task(self._end_with_ranks())
        await self._listen(config, serve_target, self._worker, self._worker.statistics)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it after the constructor and when the file's user_config has changed.

        A change that cannot be is refused in the log and in /health: an exception would make Serve
        replace the replica, with all that it is serving."""
        async with self._changing:
            await asyncio.to_thread(self._worker.reconfigure, self._config, user_config)

    async def check_health(self) -> None:
        """Raises when the engine is lost: Serve then replaces the replica."""
        if not self._worker.healthy:
            raise WorkerError("the engine is lost; the replica must be replaced")

    async def _end_with_ranks(self) -> None:
        """End this process when another rank is lost.

        The engine may be in a collective that waits for it, which nothing else ends soon; this way
        the texts go on elsewhere and Serve starts a successor at once."""
        log.critical(
            "%s; this process ends",
            await self._ranks.until_lost(self._config.coordinator.target_silence_s),
        )
        os._exit(1)

    async def placement(self) -> dict[str, Any]:
        """Node and devices of every rank, rank 0 first."""
        return {"ranks": [where(), *await self._ranks.where()]}

    async def __del__(self) -> None:
        try:
            if hasattr(self, "_watching"):
                self._watching.cancel()  # its ranks end now
            if hasattr(self, "_server"):
                await learned.end(self._keeping)
                await self._stop_listening()
                await asyncio.to_thread(self._worker.stop)
                await asyncio.to_thread(self._engine.close)
        finally:
            if hasattr(self, "_ranks"):
                self._ranks.stop()


def _with_told_drafters(config: Config) -> Config:
    """The configuration with the drafters of the deployment's user_config, so that one of them need
    not be loaded twice."""
    try:
        return replace(config, drafters=changed(config, told_at_start()).drafters)
    except ConfigError:
        return config  # `reconfigure`, which follows, says why


def _load(config: Config, address: str, gpus: GpusOfRanks) -> Engine:
    if config.target.engine.tensor_parallel == 1:
        return load_target(config, address)
    index = show_gpus(gpus, 0, os.environ)  # before torch looks for GPUs
    stay_on_this_node()
    return load_target(config, address, index)
