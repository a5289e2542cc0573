"""A coordinator with toy workers on in-process links: the stage of its tests."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig, DrafterPlacement
from cluster.config.speculation import RolloutConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.session import Session
from cluster.core import (
    Request,
    SamplingParams,
    TokenEvent,
    token_array,
)
from cluster.rpc.link import Link, memory_pair
from tests.support.clock import FakeClock
from tests.support.coordinator.toys import (
    ToyDrafter,
    ToyTarget,
    drafter_description,
    plain_text,
    target_description,
)
from tests.support.rpc.faulty import FaultPlan, FaultyLink
from tests.support.worker import texts

SOUND = FaultPlan(0)
BUDGET = "fixed"  # the adaptive one learns from real step times
GREEDY, SEEDED, LAWS = texts.GREEDY, texts.SEEDED, texts.LAWS


@dataclass
class House:
    """What a test can reach."""

    coordinator: Coordinator
    clock: FakeClock
    settings: CoordinatorConfig
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    toys: list[ToyTarget] = field(default_factory=list)

    def add_target(
        self,
        toy: ToyTarget,
        target_id: str = "target-0",
        there: FaultPlan = SOUND,
        back: FaultPlan = SOUND,
        **limits: int,
    ) -> Link[Any, Any]:
        """there, back: what happens to frames on their way to the target, and from it."""
        ours, theirs = memory_pair()
        toy.begin(target_description(target_id, **limits), self.settings)
        self.toys.append(toy)
        self.tasks.append(asyncio.create_task(toy.serve(FaultyLink(theirs, back))))
        self.coordinator.add_target(target_id, toy.describe(), FaultyLink(ours, there))
        return ours

    def add_drafter(
        self,
        toy: ToyDrafter,
        replica_id: str = "r0",
        there: FaultPlan = SOUND,
        back: FaultPlan = SOUND,
        **described: Any,
    ) -> Link[Any, Any]:
        """described: what it says of itself."""
        ours, theirs = memory_pair()
        self.tasks.append(asyncio.create_task(toy.serve(FaultyLink(theirs, back))))
        description = replace(
            drafter_description(toy.name, replica_id),
            devices=toy.devices,
            model_hash=toy.model_hash,
            **described,
        )
        link = FaultyLink(ours, there)
        self.coordinator.add_drafter(toy.name, replica_id, description, link)
        return ours

    async def ask(self, *given: Any, error: str = "", **fields: Any) -> list[TokenEvent]:
        """The events of a request, all of them.  Whatever drafters and accidents there are, its
        text is the target's own, unless it is cancelled, or ends with the error of that code."""
        asked = request(*given, **fields)
        params, events = asked.params, await collect(self.coordinator, asked)
        text = text_of(events)
        law = asked.speculation.law or self.settings.laws[0]
        if error or events[-1].finish_reason == "cancelled":
            assert events[-1].error_code == error
            assert bool(events[-1].error_message) == bool(error)
        elif (
            (law == "coupled" or params.temperature == 0.0)
            and params.beams is None
            and not params.forced_ids
        ):
            plain = plain_text(asked.prompt_ids.tolist(), params)
            limits = [toy.describe().max_context_len for toy in self.toys]
            room = min((limit for limit in limits if limit), default=len(plain) + 2**16)
            assert text == plain[: room - len(asked.prompt_ids)]
        return events

    def begin(self, *given: Any, **fields: Any) -> asyncio.Task[list[TokenEvent]]:
        """The same, beside what the test does."""
        return asyncio.create_task(self.ask(*given, **fields))

    def metrics(self) -> str:
        return self.coordinator.render_metrics().decode()

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def status(self) -> dict[str, Any]:
        return self.coordinator.status()

    @property
    def seat(self) -> Any:
        """Of the only target."""
        (found,) = self.coordinator._present.seats.values()
        return found

    def target_ids(self) -> list[str]:
        return [each["id"] for each in self.status()["targets"]]

    async def finish(self, *running: asyncio.Task[Any]) -> None:
        """Let time pass until these are over."""
        while not all(each.done() for each in running):
            await self.pass_time(1.0)
        await asyncio.gather(*running)

    async def pass_time(self, seconds: float) -> None:
        """Time passes as for workers that run: the coordinator's watch looks every half second, and
        targets beat every other time."""
        for number in range(math.ceil(seconds / 0.5)):
            self.clock.now += 0.5
            self.coordinator.tick()
            for toy in self.toys if number % 2 else ():
                toy.beat()
            await self.settle(30)

    async def settle(self, turns: int = 200) -> None:
        """Let everything that can happen without time passing happen."""
        for _ in range(turns):
            await asyncio.sleep(0)


@asynccontextmanager
async def house(
    drafters: Sequence[str] = ("a", "b"),
    rollouts: Mapping[str, RolloutConfig] | None = None,
    kind: str = "prompt_lookup",
    may_fault: bool = False,
    **settings: Any,
) -> AsyncIterator[House]:
    """may_fault: whether what only learns from rounds may fail."""
    clock = FakeClock()
    settings.setdefault("budget", BUDGET)
    own = DrafterPlacement(num_cpus=1)
    config = Config(
        drafters={
            name: DrafterConfig(kind=kind)
            if rollouts is None
            else DrafterConfig(kind=kind, placement=own, rollout=rollouts.get(name))
            for name in drafters
        },
        coordinator=CoordinatorConfig(**settings),
    )
    coordinator = Coordinator(config, clock=clock)
    stage = House(coordinator, clock, config.coordinator)
    try:
        yield stage
        stage.metrics()  # which counts what fails in it
        assert may_fault or not stage.value("drafthouse_bookkeeping_faults_total")
    finally:
        await coordinator.stop()
        for task in stage.tasks:
            task.cancel()
        await asyncio.gather(*stage.tasks, return_exceptions=True)


@asynccontextmanager
async def at_work(*toys: ToyTarget | ToyDrafter, **settings: Any) -> AsyncIterator[House]:
    """A house with these toys; its target comes first, a plain one where none is among them.

    settings: as of `house`; where there are toys that draft, its drafters are these."""
    targets = [each for each in toys if isinstance(each, ToyTarget)] or [ToyTarget()]
    drafters = [each for each in toys if isinstance(each, ToyDrafter)]
    if drafters:
        settings.setdefault("drafters", [each.name for each in drafters])
    async with house(**settings) as stage:
        for target in targets:
            stage.add_target(target)
        for each in drafters:
            stage.add_drafter(each)
        yield stage


def request(
    prompt: Sequence[int] = (1, 2, 3), params: SamplingParams = GREEDY, id: str = "r", **fields: Any
) -> Request:
    return Request(id, token_array(prompt), params, **fields)


def session(*given: Any, **fields: Any) -> Session:
    """What the coordinator knows of such a request; its events go nowhere."""
    asked = request(*given, **fields)
    return Session(asked.id, asked, lambda event: None, 0.0)


async def collect(coordinator: Coordinator, asked: Request) -> list[TokenEvent]:
    async with asyncio.timeout(20):
        return [event async for event in coordinator.submit(asked)]


def text_of(events: Sequence[TokenEvent]) -> list[int]:
    """The tokens of a stream, after checking that its positions are gapless and it ends once."""
    tokens: list[int] = []
    for event in events:
        assert event.position == len(tokens)
        tokens.extend(event.token_ids.tolist())
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [
        True
    ]
    return tokens
