"""A step loop over a toy engine, driven by hand: no thread, no network, the same way each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from cluster import metrics
from cluster.config.schema import CoordinatorConfig
from cluster.engine.engine import Engine
from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder
from cluster.plan.controller import Controller
from cluster.plan.roster import DraftScores, Roster
from cluster.rpc.messages import (
    Open,
    PoolTree,
    StepFrame,
    TextName,
    VerdictFrame,
    WorkerDescription,
)
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.step_loop import StepLoop
from cluster.worker.text_keeper import TextKeeper
from cluster.worker.verifier import Verifier
from tests.support.clock import FakeClock
from tests.support.worker.texts import Told
from tests.support.worker.toy_engine import ToyEngine


class Desk(Told):
    """A coordinator at its end of a stream.  reads: whether it says what it has received.
    num_steps: that its texts took in `written`."""

    def __init__(self, target: Steps) -> None:
        super().__init__()
        self.reads = True
        self.num_steps = 0
        self.target = target
        self.stream = target.streams.open(self)
        self.sending = asyncio.create_task(self.stream.send_forever())

    async def send(self, frame: VerdictFrame) -> None:
        """Called by the stream."""
        self.take(frame)
        if self.reads:
            self.stream.acknowledged = frame.serial

    def post(
        self,
        *opens: Open,
        cancels: Sequence[TextName] = (),
        trees: Sequence[PoolTree] = (),
        **fields: Any,
    ) -> None:
        """Send a frame; it is taken in before the next step."""
        frame = StepFrame(tuple(opens), tuple(cancels), tuple(trees), **fields)
        self.target.mailbox.put(partial(self.target.texts.apply, self.stream, frame))

    async def turn(self) -> None:
        await self.target.turn()

    async def run(self) -> int:
        return await self.target.run()

    def leave(self) -> None:
        self.target.streams.close(self.stream)
        self.target.mailbox.put(partial(self.target.texts.free, self.stream))


class Steps:
    """The loop and all that it works with."""

    def __init__(
        self,
        engine: ToyEngine | Engine | None = None,
        residents: Sequence[ResidentDrafter] = (),
        *,
        max_texts: int = 64,
        max_rows: int = 512,
        roster: Roster | None = None,
        clock: Callable[[], float] | None = None,
        verifier: Verifier | None = None,
        config: CoordinatorConfig | None = None,
        worker_id: str = "w",
        **settings: Any,
    ) -> None:
        """max_rows: of a step.  config, or settings: of the coordinator."""
        config = config or CoordinatorConfig(**{"budget": "fixed", **settings})
        clock = clock or FakeClock(tick_s=0.0001)
        self.engine: Any = engine or ToyEngine()
        self.controller = Controller(config, scores=DraftScores(roster))
        self.residents = Residents(residents, clock)
        self.verifier = verifier or Verifier(self.engine, clock, wants=self.residents.wants)
        description = WorkerDescription(
            worker_id,
            "target",
            "toy",
            vocab_size=self.engine.vocab_size,
            max_running_sequences=max_texts,
            max_batch_tokens=max_rows,
        )
        told = self.verifier, self.residents, self.controller, description
        self.texts = texts = TextKeeper(*told)
        self.loop = StepLoop(texts, clock)
        self.streams, self.mailbox = texts.streams, texts.mailbox
        self.desks: list[Desk] = []

    def connect(self) -> Desk:
        self.desks.append(Desk(self))
        return self.desks[-1]

    async def turn(self) -> None:
        """Take in what has come, make a step, and let what it says arrive."""
        assert self.mailbox.take(is_busy=True)
        self.loop.turn()
        for _ in range(4):
            await asyncio.sleep(0)

    async def run(self, most: int = 1000) -> int:
        """Go on while there is something to do; returns the steps that it took."""
        await self.turn()
        for count in range(1, most):
            if not self.loop.has_work:
                return count
            await self.turn()
        raise AssertionError(f"there is no end after {most} steps")

    def told(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The values of one of the target's own metrics, by its labels."""
        self.loop.report()
        return recorded(self.loop.recorder, metric)


def recorded(recorder: Recorder, metric: Metric) -> dict[tuple[str, ...], float]:
    """The values of a metric, by its labels."""
    return {
        tuple(sample.labels[name] for name in metric.labels): sample.value
        for family in recorder.collect()
        if family.name == metric.name
        for sample in family.samples
    }


@asynccontextmanager
async def steps(*given: Any, **settings: Any) -> AsyncIterator[Steps]:
    """As `Steps`; at the end nothing may have failed behind a fence."""
    built = Steps(*given, **settings)
    try:
        yield built
        assert built.told(metrics.BOOKKEEPING_FAULTS) == {}
    finally:
        for desk in built.desks:
            desk.sending.cancel()
        await asyncio.gather(*(desk.sending for desk in built.desks), return_exceptions=True)


@asynccontextmanager
async def desk_of(*opens: Open, **settings: Any) -> AsyncIterator[Desk]:
    """The desk of the only coordinator of such a target, which has opened these texts."""
    async with steps(**settings) as target:
        desk = target.connect()
        if opens:
            desk.post(*opens)
        yield desk


async def written(*opens: Open, **settings: Any) -> Desk:
    """The same, once the texts have come to an end."""
    async with desk_of(*opens, **settings) as desk:
        desk.num_steps = await desk.run()
    return desk
