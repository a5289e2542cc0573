"""A target worker with its engine thread, and coordinators on in-process links."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cluster.config.schema import Config, CoordinatorConfig
from cluster.draft.base import Drafter
from cluster.rpc.link import Link, memory_pair
from cluster.rpc.messages import HEARTBEAT_S, Open, StepFrame, VerdictFrame, WorkerDescription
from cluster.worker.residents import Residents
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Prepare, Verifier
from tests.support.worker.residents import resident
from tests.support.worker.texts import VOCAB_SIZE, Told
from tests.support.worker.toy_engine import ToyEngine

PATIENCE_S = 20.0
# Frames that a coordinator reads before it says so.
_ACKNOWLEDGED_EVERY = 16


class Peer(Told):
    """A coordinator.  It reads where it waits for something, and says what it has read."""

    def __init__(self, link: Link[Any, Any]) -> None:
        super().__init__()
        self.link = link
        self.serial = 0

    async def send(self, frame: StepFrame) -> None:
        await self.link.send(frame)

    async def open(self, *opens: Open) -> None:
        await self.send(StepFrame(opens))

    async def next(self) -> VerdictFrame:
        """The next frame."""
        async with asyncio.timeout(PATIENCE_S):
            frame: VerdictFrame = await anext(self.link)
        self.take(frame)
        self.serial = max(self.serial, frame.serial)
        if frame.serial % _ACKNOWLEDGED_EVERY == 0:
            await self.send(StepFrame(acknowledged=self.serial))
        return frame

    async def next_beat(self) -> VerdictFrame:
        """The next frame with a heartbeat."""
        while (frame := await self.next()).heartbeat is None:
            continue
        return frame

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.next()

    async def written(self, *opens: Open) -> list[list[int]]:
        """Open texts and wait for their ends."""
        await self.open(*opens)
        names = [each.request_id for each in opens]
        await self.until(lambda: all(self.is_over(name) for name in names))
        return [self.text(name) for name in names]


@dataclass
class Stage:
    worker: TargetWorker
    serving: list[asyncio.Task[None]] = field(default_factory=list)

    def connect(self) -> Peer:
        ours, theirs = memory_pair()
        self.serving.append(asyncio.create_task(self.worker.serve(theirs)))
        return Peer(ours)


def worker_of(
    drafters: Mapping[str, Drafter],
    engine: ToyEngine | None = None,
    prepare: Prepare = lambda params: None,
    heartbeat_s: float = HEARTBEAT_S,
    **settings: Any,
) -> TargetWorker:
    """A target worker with these drafters inside, not started.

    prepare: the verifier's.  settings: of the coordinator.
    """
    engine = engine or ToyEngine()
    description = WorkerDescription(
        "w",
        "target",
        "toy",
        model_hash="m",
        tokenizer_hash="t",
        vocab_size=VOCAB_SIZE,
        max_context_len=4096,
        max_running_sequences=64,
        max_batch_tokens=512,
        residents=tuple(drafters),
    )
    residents = Residents([resident(each, name) for name, each in drafters.items()])
    config = CoordinatorConfig(**{"budget": "fixed", **settings})
    parts = parts_around(engine, residents, prepare)
    return TargetWorker(parts, Config(coordinator=config), description, heartbeat_s=heartbeat_s)


NOBODY = WorkerDescription("w", "target", "toy")


def parts_around(
    engine: Any, residents: Residents | None = None, prepare: Prepare = lambda params: None
) -> Any:
    """As `TargetParts`, of an engine that nothing was measured of."""
    residents = residents or Residents(())
    verifier = Verifier(engine, prepare=prepare, wants=residents.wants)
    return SimpleNamespace(
        engine=engine,
        engines=(),
        residents=residents,
        verifier=verifier,
        profile=None,
        draft_times=(),
    )


@asynccontextmanager
async def stage(worker: TargetWorker) -> AsyncIterator[Stage]:
    """Run it until the end of the block."""
    worker.start()
    built = Stage(worker)
    try:
        yield built
    finally:
        for task in built.serving:
            task.cancel()
        await asyncio.gather(*built.serving, return_exceptions=True)
        await asyncio.to_thread(worker.stop)
