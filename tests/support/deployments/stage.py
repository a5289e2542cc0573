"""The ingress with coordinators on in-process links, for tests that need no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.rpc.connections import Endpoint
from cluster.rpc.memory import MemoryLink, memory_pair
from deployments.ingress.coordinators import Coordinators
from tests.support.coordinator.house import House
from tests.support.coordinator.toys import ToyTarget


class Nowhere:
    """Where coordinators are that are connected by hand."""

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield frozenset()


class Stage:
    """Coordinators that can be lost, each with a toy target of its own."""

    def __init__(self, ingress: Coordinators) -> None:
        self.ingress = ingress
        self.links: dict[str, MemoryLink[object, object]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def add(
        self, name: str, stage: House, toy: ToyTarget | None = None, **limits: int
    ) -> ToyTarget:
        toy = toy or ToyTarget()
        stage.add_target(toy, **limits)
        ours, theirs = memory_pair()
        self.links[name] = ours
        description = stage.coordinator.describe()
        self.tasks += [
            asyncio.create_task(stage.coordinator.serve(theirs)),
            asyncio.create_task(self.ingress.use(name, description, ours)),
        ]
        return toy

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    setting = Stage(Coordinators(connect_timeout_s=0.2))
    try:
        yield setting
    finally:
        await setting.close()
