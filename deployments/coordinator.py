"""The coordinator as a Ray Serve deployment: it finds its workers and leads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve

from cluster.config.applications import drafter_deployment
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.lead import led_by
from cluster.messages import WorkerDescription
from cluster.metrics.recorder import COORDINATOR, Recorder
from cluster.plan.autoscaling import WAITING, Statistics
from cluster.rpc.connections import Connections
from cluster.rpc.link import end_tasks
from cluster.rpc.server import serve_coordinator
from cluster.worker.priority import lower_priority
from deployments import learned
from deployments.endpoints import running_replicas
from deployments.replica import (
    Exporter,
    WorkerReplica,
    configure_logging,
    cpu_use,
    has_others,
    process_id,
    tell_forever,
)


class CoordinatorDeployment(WorkerReplica):
    """One coordinator replica: it leads the targets and asks every drafter it can reach."""

    async def __init__(self, config: Config, target: Any, drafters: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """target, drafters: Serve handles; they only say where the replicas listen."""
        lower_priority(config.coordinator.nice)  # threads that start later inherit it
        configure_logging(config.log_format)
        self._config = config
        name = process_id("coordinator")
        recorder = Recorder(name, COORDINATOR, model_name=config.model_name)
        self._part: Coordinator = Coordinator(config, recorder, worker_id=name)
        await self._part.start()
        self._keeping: list[asyncio.Task[None]] = []
        await self._listen(config, serve_coordinator, self._part, cpu_use())
        self._target, self._handles = target, drafters
        context = serve.get_replica_context()
        # Ray's own dashboard has rows only for replicas that were called by a handle.
        self._called = [
            serve.get_deployment_handle(name, app_name=context.app_name)
            for name in (context.deployment, "ingress")
        ]
        self._targets = self._led(target, look_at=self._keep_learned)
        # By name and application, with their handles.
        self._pools: dict[tuple[str, str], tuple[Any, Connections[Any]]] = {}
        await self._find_drafters(config)
        exporter = Exporter(recorder, self._part.render_metrics)
        self._tasks = [
            asyncio.create_task(exporter.run_forever()),
            asyncio.create_task(tell_forever(name, self._demands)),
        ]
        if await asyncio.to_thread(has_others):
            await self._targets.first_link()

    async def _use(self, config: Config) -> None:
        self._part.use(config)
        await self._find_drafters(config)

    async def _find_drafters(self, config: Config) -> None:
        """Look for the drafters of the pool, wherever they are, and leave those that are gone."""
        wanted = {(name, config.drafters[name].application) for name in config.pool}
        for gone in self._pools.keys() - wanted:
            await self._pools.pop(gone)[1].stop()
        for name, application in wanted - self._pools.keys():
            handle = (
                serve.get_deployment_handle(drafter_deployment(name), app_name=application)
                if application
                else self._handles[name]
            )
            self._pools[name, application] = handle, self._led(handle, name)

    async def __del__(self) -> None:
        if not hasattr(self, "_tasks"):
            return  # the constructor failed
        await end_tasks(*self._tasks, *self._keeping)
        # Texts go on until their ingresses have gone to another coordinator with them.
        await self._server.stop()
        for led in (self._targets, *(led for _, led in self._pools.values())):
            await led.stop()
        await self._part.stop()

    def _demands(self) -> list[tuple[Any, Statistics]]:
        """Return what targets and drafters are told of their demand, with their handles."""
        demand = self._part.demand()
        return [
            *((handle, {}) for handle in self._called),
            (self._target, {WAITING: self._part.load().num_waiting}),
            *(
                (pool, demand[name])
                for (name, _), (pool, _) in self._pools.items()
                if name in demand
            ),
        ]

    def _led(
        self,
        handle: Any,
        name: str = "",
        look_at: Callable[[WorkerDescription], None] | None = None,
    ) -> Connections[Any]:
        """Begin to lead the replicas that the handle reaches; see `led_by`."""
        led = led_by(
            self._part, self._config, running_replicas(handle), name, self._trust, look_at=look_at
        )
        led.start()
        return led

    def _keep_learned(self, target: WorkerDescription) -> None:
        if not self._keeping:  # once, whichever target it is
            whose = f"coordinator {serve.get_replica_context().rank.rank}"
            self._keeping = learned.keep(self._config, target, whose, self._part)
