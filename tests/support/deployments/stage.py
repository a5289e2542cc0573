"""The ingress with coordinators on in-process links, for tests that need no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cluster.config.schema import CoordinatorConfig
from cluster.rpc.connections import Endpoint
from cluster.rpc.link import MemoryLink, memory_pair
from deployments.ingress.coordinators import Coordinators
from tests.support.coordinator.house import House, house
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
    setting = Stage(Coordinators(CoordinatorConfig(target_timeout_s=0.2)))
    try:
        yield setting
    finally:
        await setting.close()


@asynccontextmanager
async def alone(
    drafters: Sequence[str] = ("a", "b"), *, context: int | None = None, **settings: Any
) -> AsyncIterator[tuple[Coordinators, House, ToyTarget]]:
    """One coordinator with these settings and one target.  context: the target's longest."""
    limits = {} if context is None else {"max_context_len": context}
    async with stage() as setting, house(drafters, **settings) as only:
        toy = setting.add("a", only, **limits)
        await asyncio.sleep(0)
        yield setting.ingress, only, toy
