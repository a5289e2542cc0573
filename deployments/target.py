"""The target as a Ray Serve deployment: rank 0 in the replica, the other ranks beside it."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.config.live import changed
from cluster.config.schema import Config
from cluster.errors import ConfigError, WorkerError
from cluster.worker.build import load_target
from cluster.worker.ranks import Ranks
from deployments import learned
from deployments.replica import Exporter, WorkerReplica, process_id, told_at_start, where

log = logging.getLogger(__name__)


class TargetDeployment(WorkerReplica):
    """One target replica: its engine in a thread, and a gRPC server for the coordinators."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        self._begin(config, "target")
        self._changing = asyncio.Lock()
        ranks = self._ranks = Ranks(config)
        self._ending.push_async_callback(asyncio.to_thread, ranks.stop)
        # Loading takes from seconds to minutes, measuring some seconds, and Serve asks for
        # the state meanwhile.
        load = partial(load_target, _with_told_drafters(config), worker_id=process_id("target"))
        worker = self._worker = await ranks.load(load)
        keeping = learned.keep(config, worker.describe(), "target", worker)
        worker.start()
        self._ending.push_async_callback(asyncio.to_thread, worker.stop)
        self._go_on(*keeping, Exporter(worker.recorder).run_forever())
        await self._listen(worker, worker.statistics)
        self._go_on(ranks.end_with_them(config.coordinator.target_silence_s))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it after the constructor and when the file's user_config has changed.

        A change that cannot be is refused in the log and in /health: an exception would make Serve
        replace the replica, with all that it is serving."""
        async with self._changing:
            await asyncio.to_thread(self._worker.reconfigure, self._config, user_config)

    async def check_health(self) -> None:
        """Raises when the engine is lost: Serve then replaces the replica."""
        if not self._worker.is_healthy:
            raise WorkerError("the engine is lost; the replica must be replaced")

    async def placement(self) -> dict[str, Any]:
        """Node and devices of all ranks, and the process of each, rank 0 first."""
        pids = (os.getpid(), *self._ranks.pids)
        return {"ranks": [{**where(), "pid": pid} for pid in pids]}


def _with_told_drafters(config: Config) -> Config:
    """The configuration with the drafters of the deployment's user_config, so that one of them need
    not be loaded twice."""
    try:
        return replace(config, drafters=changed(config, told_at_start()).drafters)
    except ConfigError:
        return config  # `reconfigure`, which follows, says why
