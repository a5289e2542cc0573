"""The coordinator as a Ray Serve deployment: it finds its workers and leads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve

from cluster.config.applications import drafter_deployment
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.errors import ProtocolError
from cluster.messages import (
    CommitFrame,
    ProposalFrame,
    StepFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.metrics.recorder import Recorder
from cluster.metrics.told import COORDINATOR
from cluster.plan.autoscaling import WAITING, Statistics
from cluster.rpc.channel import Expectations, connect_drafter, connect_target
from cluster.rpc.link import Link
from cluster.rpc.server import serve_coordinator
from deployments import learned
from deployments.connections import Connections
from deployments.demand import tell_forever
from deployments.endpoints import Endpoint, ServeEndpoints
from deployments.exporter import Exporter
from deployments.replica import (
    CpuUse,
    WorkerReplica,
    configure_logging,
    has_others,
    process_id,
    reconfigured,
)

TargetLink = Link[StepFrame, VerdictFrame]
DrafterLink = Link[CommitFrame, ProposalFrame]


class CoordinatorDeployment(WorkerReplica):
    """One coordinator replica: it leads the targets and asks every drafter it can reach."""

    async def __init__(self, config: Config, target: Any, drafters: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """target, drafters: Serve handles; they only say where the replicas listen."""
        configure_logging(config.log_format)
        self._config = config
        name = process_id("coordinator")
        recorder = Recorder(name, COORDINATOR, model_name=config.model_name)
        self._coordinator = Coordinator(config, recorder, worker_id=name)
        await self._coordinator.start()
        self._keeping: asyncio.Task[None] | None = None
        statistics = CpuUse().statistics
        await self._listen(config, serve_coordinator, self._coordinator, statistics)
        self._exporter = Exporter(recorder, self._coordinator.render_metrics)
        self._exporter.start()
        self._target, self._handles = target, drafters
        context = serve.get_replica_context()
        # Ray's own dashboard has rows only for replicas that were called by a handle.
        self._called = [
            serve.get_deployment_handle(name, app_name=context.app_name)
            for name in (context.deployment, "ingress")
        ]
        self._targets = Connections(
            "target", ServeEndpoints(target), self._connect_target, self._use_target
        )
        self._targets.start()
        self._pools: dict[tuple[str, str], Connections[DrafterLink]] = {}
        self._asked: dict[tuple[str, str], Any] = {}  # their handles
        await self._find_drafters(config)
        self._telling = asyncio.create_task(tell_forever(name, self._demands))
        if await asyncio.to_thread(has_others):
            await self._targets.first_link()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls it after the constructor and when the file's user_config has changed."""
        refused = await reconfigured(self._config, user_config, self._use)
        if refused:
            self._coordinator.refuse_config(refused)

    async def _use(self, config: Config) -> None:
        self._coordinator.use(config)
        await self._find_drafters(config)

    async def _find_drafters(self, config: Config) -> None:
        """Look for the drafters of the pool, wherever they are, and leave those that are gone."""
        wanted = {(name, config.drafters[name].application) for name in config.pool}
        for gone in self._pools.keys() - wanted:
            del self._asked[gone]
            await self._pools.pop(gone).stop()
        for name, application in wanted - self._pools.keys():
            handle = self._asked[name, application] = (
                serve.get_deployment_handle(drafter_deployment(name), app_name=application)
                if application
                else self._handles[name]
            )
            connections = self._pools[name, application] = self._pool(name, handle)
            connections.start()

    async def __del__(self) -> None:
        if not hasattr(self, "_telling"):
            return  # the constructor failed
        self._telling.cancel()
        await learned.end(self._keeping)
        # Texts go on until their ingresses have gone to another coordinator with them.
        await self._stop_listening()
        everything: list[Connections[Any]] = [self._targets, *self._pools.values()]
        for connections in everything:
            await connections.stop()
        await self._coordinator.stop()
        await self._exporter.stop()

    def _demands(self) -> list[tuple[Any, Statistics]]:
        """Return what targets and drafters are told of their demand, with their handles."""
        demand = self._coordinator.demand()
        waiting = {WAITING: self._coordinator.load().num_waiting}
        drafters = ((handle, demand.get(name)) for (name, _), handle in self._asked.items())
        return [
            *((handle, {}) for handle in self._called),
            (self._target, waiting),
            *((handle, said) for handle, said in drafters if said),
        ]

    async def _connect_target(self, endpoint: Endpoint) -> tuple[WorkerDescription, TargetLink]:
        return await connect_target(
            endpoint.address,
            Expectations(worker_id=endpoint.worker_id),
            max_frame_bytes=self._config.coordinator.max_frame_bytes,
            trust=self._trust,
        )

    async def _use_target(
        self, endpoint: Endpoint, description: WorkerDescription, link: TargetLink
    ) -> None:
        if self._keeping is None:  # once, whichever target it is
            whose = f"coordinator {serve.get_replica_context().rank.rank}"
            self._keeping = learned.keep(
                self._config, description, whose,
                self._coordinator.restore_learned, self._coordinator.export_learned,
            )  # fmt: skip
        left = self._coordinator.add_target(endpoint.id, description, link)
        try:
            await asyncio.wait({left})  # not its outcome: it is cancelled where we leave
        finally:
            self._coordinator.remove_target(endpoint.id)

    def _pool(self, name: str, handle: Any) -> Connections[DrafterLink]:
        async def connect(endpoint: Endpoint) -> tuple[WorkerDescription, DrafterLink]:
            if endpoint.refusal:
                self._coordinator.refuse_drafter(name, endpoint.refusal)
                raise ProtocolError(endpoint.refusal)
            return await connect_drafter(
                endpoint.address,
                Expectations(worker_id=endpoint.worker_id),
                max_frame_bytes=self._config.coordinator.max_frame_bytes,
                trust=self._trust,
                name=name,
            )

        async def use(
            endpoint: Endpoint, description: WorkerDescription, link: DrafterLink
        ) -> None:
            left = self._coordinator.add_drafter(name, endpoint.id, description, link)
            try:
                await asyncio.wait({left})  # not its outcome: it is cancelled where we leave
            finally:
                self._coordinator.remove_drafter(name, endpoint.id)

        return Connections(f"drafter {name}", ServeEndpoints(handle), connect, use)
