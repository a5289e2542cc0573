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
from cluster.rpc.link import end_tasks
from cluster.rpc.server import serve_target
from cluster.worker.build import load_target
from cluster.worker.ranks import Ranks
from deployments import learned
from deployments.replica import (
    Exporter,
    WorkerReplica,
    configure_logging,
    process_id,
    told_at_start,
    where,
)

log = logging.getLogger(__name__)


class TargetDeployment(WorkerReplica):
    """One target replica: its engine in a thread, and a gRPC server for the coordinators."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_logging(config.log_format)
        self._config = config
        self._changing = asyncio.Lock()
        self._ranks = Ranks(config)
        config = _with_told_drafters(config)
        # Loading takes from seconds to minutes, measuring some seconds, and Serve asks for
        # the state meanwhile.
        load = partial(load_target, config, worker_id=process_id("target"))
        self._worker = await self._ranks.load(load)
        self._tasks = learned.keep(self._config, self._worker.describe(), "target", self._worker)
        self._worker.start()
        await self._listen(config, serve_target, self._worker, self._worker.statistics)
        for forever in (
            Exporter(self._worker.recorder).run_forever(),
            self._ranks.end_with_them(config.coordinator.target_silence_s),
        ):
            self._tasks.append(asyncio.create_task(forever))

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

    async def __del__(self) -> None:
        try:
            if hasattr(self, "_server"):
                await end_tasks(*self._tasks)
                await self._server.stop()
                await asyncio.to_thread(self._worker.stop)
        finally:
            if hasattr(self, "_ranks"):
                await asyncio.to_thread(self._ranks.stop)


def _with_told_drafters(config: Config) -> Config:
    """The configuration with the drafters of the deployment's user_config, so that one of them need
    not be loaded twice."""
    try:
        return replace(config, drafters=changed(config, told_at_start()).drafters)
    except ConfigError:
        return config  # `reconfigure`, which follows, says why
