"""The ingress with coordinators on in-process links, for tests that need no Ray."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cluster.config.schema import Config, CoordinatorConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.core import SamplingParams
from cluster.rpc.connections import Endpoint
from cluster.rpc.link import Link, Mailbox
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.ingress import Ingress
from tests.support.coordinator.house import House, house
from tests.support.coordinator.toys import ToyTarget
from tests.support.text.tokenizers_for_tests import small_tokenizer


class Nowhere:
    """Where coordinators are that are connected by hand."""

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield frozenset()


def toys_ingress(config: Config, places: Any = None) -> Ingress:
    """An ingress in front of toys.  places: where its coordinators are."""
    return Ingress(config, small_tokenizer(), SamplingParams(max_tokens=0), places or Nowhere())


class Near(Link[Any, Any]):
    """The way to a coordinator of this process, with its calls beside the stream."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(Mailbox(), Mailbox())
        self.coordinator = coordinator
        self.theirs = Link(self._inbox, self._outbox)
        self.watch = coordinator.watch

    async def metrics(self, timeout_s: float) -> bytes:
        return self.coordinator.render_metrics()

    async def status(self, timeout_s: float) -> dict[str, Any]:
        return self.coordinator.status()


def meeting(ingress: Coordinators, name: str, link: Near) -> list[asyncio.Task[None]]:
    """The two ends of a link at work."""
    description = link.coordinator.describe()
    return [
        asyncio.create_task(link.coordinator.serve(link.theirs)),
        asyncio.create_task(ingress.use(Endpoint(name, ""), description, link)),
    ]


class Stage:
    """Coordinators that can be lost, each with a toy target of its own."""

    def __init__(self, ingress: Coordinators) -> None:
        self.ingress = ingress
        self.links: dict[str, Near] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def add(
        self, name: str, stage: House, toy: ToyTarget | None = None, **limits: int
    ) -> ToyTarget:
        toy = toy or ToyTarget()
        stage.add_target(toy, **limits)
        self.links[name] = Near(stage.coordinator)
        self.tasks += meeting(self.ingress, name, self.links[name])
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
    drafters: Sequence[str] = ("a", "b"),
    *,
    toy: ToyTarget | None = None,
    context: int | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Coordinators, House, ToyTarget]]:
    """One coordinator with these settings and one target.  context: the target's longest."""
    limits = {} if context is None else {"max_context_len": context}
    async with stage() as setting, house(drafters, **settings) as only:
        toy = setting.add("a", only, toy, **limits)
        await asyncio.sleep(0)
        yield setting.ingress, only, toy
