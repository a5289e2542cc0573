"""The coordinator as a Ray Serve deployment: it finds its workers and leads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ray import serve

from cluster.config.applications import drafter_deployment
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.lead import led_by
from cluster.metrics.recorder import COORDINATOR, Recorder
from cluster.plan.autoscaling import WAITING, Statistics
from cluster.rpc.connections import Connections
from cluster.rpc.messages import WorkerDescription
from cluster.worker.priority import lower_priority
from deployments import learned
from deployments.endpoints import running_replicas
from deployments.replica import (
    Exporter,
    WorkerReplica,
    cpu_use,
    has_others,
    process_id,
    tell_forever,
)


class CoordinatorDeployment(WorkerReplica):
    """One coordinator replica: it leads the targets and asks every drafter it can reach."""

    _keeps_learned = False

    async def __init__(self, config: Config, target: Any, drafters: Sequence[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """target, drafters: Serve handles; they only say where the replicas listen, and Serve
        deploys what hangs together."""
        lower_priority(config.coordinator.nice)  # threads that start later inherit it
        self._begin(config, "coordinator")
        name = process_id("coordinator")
        recorder = Recorder(name, COORDINATOR, model_name=config.model_name)
        self._part: Coordinator = Coordinator(config, recorder, worker_id=name)
        await self._part.start()
        self._ending.push_async_callback(self._part.stop)
        context = serve.get_replica_context()
        self._application, self._target = context.app_name, target
        # Ray's own dashboard has rows only for replicas that were called by a handle.
        self._called = [
            serve.get_deployment_handle(name, app_name=context.app_name)
            for name in (context.deployment, "ingress")
        ]
        targets = self._led(target, look_at=self._keep_learned)
        # By name and application, with their handles.
        self._pools: dict[tuple[str, str], tuple[Any, Connections[Any]]] = {}
        await self._find_drafters(config)
        self._go_on(
            Exporter(recorder, self._part.render_metrics).run_forever(),
            tell_forever(name, self._demands),
        )
        # Ends before the links: texts go on until their ingresses have gone to another coordinator
        # with them.
        await self._listen(self._part, cpu_use())
        if await asyncio.to_thread(has_others):
            await targets.first_link()

    async def _use(self, config: Config) -> None:
        self._part.use(config)
        await self._find_drafters(config)

    async def _find_drafters(self, config: Config) -> None:
        """Look for the drafters of the pool, wherever they are, and leave those that are gone."""
        wanted = {(name, config.drafters[name].application) for name in config.pool}
        for gone in self._pools.keys() - wanted:
            await self._pools.pop(gone)[1].stop()
        for name, application in wanted - self._pools.keys():
            handle = serve.get_deployment_handle(
                drafter_deployment(name), app_name=application or self._application
            )
            self._pools[name, application] = handle, self._led(handle, name)

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
        self._ending.push_async_callback(led.stop)
        return led

    def _keep_learned(self, target: WorkerDescription) -> None:
        if not self._keeps_learned:  # once, whichever target it is
            self._keeps_learned = True
            whose = f"coordinator {serve.get_replica_context().rank.rank}"
            self._go_on(*learned.keep(self._config, target, whose, self._part))
