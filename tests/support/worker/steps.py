"""A step loop over a toy engine, driven by hand: no thread, no network, the same way each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cluster import metrics
from cluster.config.schema import CoordinatorConfig
from cluster.engine.engine import Engine
from cluster.messages import Open, PoolTree, StepFrame, TextName, VerdictFrame
from cluster.metrics import Metric
from cluster.metrics.recorder import Recorder
from cluster.plan.controller import Controller
from cluster.plan.roster import Roster
from cluster.plan.scores import DraftScores
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.step_loop import StepLoop
from cluster.worker.target_stream import Mailbox, TargetStream, TargetStreams
from cluster.worker.texts import TextTable
from cluster.worker.verifier import Verifier
from tests.support.worker.texts import VOCAB_SIZE, Told
from tests.support.worker.toy_engine import ToyEngine, hashed_law


class Clock:
    """Time as an argument: each look at it takes a tenth of a millisecond."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


class Desk(Told):
    """A coordinator at its end of a stream.  reads: whether it says what it has received."""

    def __init__(self, steps: Steps, stream: TargetStream) -> None:
        super().__init__()
        self.reads = True
        self.stream = stream
        self._steps = steps
        self.sending = asyncio.create_task(stream.send_forever(self))  # type: ignore[arg-type]

    async def send(self, frame: VerdictFrame) -> None:
        """Called by the stream."""
        self.take(frame)
        if self.reads:
            self.stream.acknowledged = frame.serial

    def post(
        self, *opens: Open, cancels: Sequence[TextName] = (), trees: Sequence[PoolTree] = (),
        **fields: Any,
    ) -> None:  # fmt: skip
        """Send a frame; it is taken in before the next step."""
        self._steps.mailbox.put(
            self.stream, StepFrame(tuple(opens), tuple(cancels), tuple(trees), **fields)
        )

    def leave(self) -> None:
        self._steps.streams.close(self.stream)
        self._steps.mailbox.put(self.stream, None)


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
        clock = clock or Clock()
        self.engine: Any = engine or ToyEngine(hashed_law(VOCAB_SIZE), VOCAB_SIZE)
        self.controller = Controller(config, scores=DraftScores(roster))
        self.residents = Residents(residents, clock)
        self.texts = TextTable(
            self.residents.names, self.engine.vocab_size, config.max_draft_tokens
        )
        self.streams = TargetStreams(max_texts, self.texts)
        self.mailbox = Mailbox()
        self.verifier = verifier or Verifier(self.engine, clock, wants=self.residents.wants)
        self.loop = StepLoop(
            self.verifier, self.residents, self.controller, self.streams, self.texts, self.mailbox,
            worker_id=worker_id, max_batch_tokens=max_rows, clock=clock,
        )  # fmt: skip
        self.desks: list[Desk] = []

    def connect(self) -> Desk:
        self.desks.append(Desk(self, self.streams.open()))
        return self.desks[-1]

    async def turn(self) -> None:
        """Take in what has come, make a step, and let what it says arrive."""
        mail = self.mailbox.take(is_busy=True)
        assert mail is not None
        self.loop.turn(mail)
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
        for family in recorder.families()
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
