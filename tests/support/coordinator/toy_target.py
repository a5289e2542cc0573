"""A target that is the real step loop over a toy engine, driven in the event loop.

There is no thread and no time but its own, so a test of the coordinator runs whole, in
milliseconds, and the same way each time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cluster.config.schema import CoordinatorConfig
from cluster.core import TokenTree
from cluster.engine.work import Output
from cluster.errors import DrafthouseError, WorkerError
from cluster.rpc.link import Link, run_until_first_ends
from cluster.rpc.messages import (
    Heartbeat,
    Open,
    StepFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.worker.mailbox import TargetStream
from cluster.worker.residents import ResidentDrafter
from cluster.worker.texts import TargetText
from cluster.worker.verifier import Verifier
from tests.support.coordinator.toy_law import VOCAB_SIZE, toy_law
from tests.support.worker.steps import Steps
from tests.support.worker.toy_engine import Law, ToyEngine

TargetLink = Link[VerdictFrame, StepFrame]
FIXED = CoordinatorConfig(budget="fixed")


def target_description(worker_id: str = "target-0", **limits: int) -> WorkerDescription:
    usual = {"max_context_len": 4096, "max_running_sequences": 64, "max_batch_tokens": 512}
    return WorkerDescription(
        worker_id,
        "target",
        "toy",
        model_hash="m",
        tokenizer_hash="t",
        vocab_size=VOCAB_SIZE,
        **usual | limits,
    )


@dataclass(frozen=True, eq=False)
class Item:
    """A text as the verifier was asked for it, and the nodes to verify.

    base_len, context_len: the tokens that the engine held, and all tokens, at that time.
    """

    text: TargetText
    tree: TokenTree
    base_len: int
    context_len: int

    @property
    def request_id(self) -> str:
        return self.text.id


Asked = Sequence[tuple[TargetText, TokenTree]]


@dataclass(eq=False)
class ToyTarget:
    """Serves any number of coordinators.

    refuses: why the engine cannot serve an item, None = it can.  keeps: whether it answers the text
    of that name, and has not lost it by then.  waits: whether it has no pages yet for the text of
    that name.  hears, says: what comes, or is sent, in place of a frame; None = none.
    `gate`: cleared, as it is at first where is_held, no step begins, as if the engine were in a
    long one.  is_mute: it does not beat either.  frames: what has come.
    steps: the items of each step.
    step_turns: turns of the event loop that a step takes, so that drafters get to answer meanwhile.
    step_s, row_s, free_rows: what a step takes by the target's own clock.
    """

    refuses: Callable[[Item], DrafthouseError | None] = lambda item: None
    keeps: Callable[[str], bool] = lambda name: True
    waits: Callable[[str], bool] = lambda name: False
    hears: Callable[[StepFrame], StepFrame | None] = lambda frame: frame
    says: Callable[[VerdictFrame], VerdictFrame | None] = lambda frame: frame
    frames: list[StepFrame] = field(default_factory=list)
    steps: list[Sequence[Item]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_held: bool = False
    is_mute: bool = False
    step_turns: int = 20
    step_s: float = 0.002
    row_s: float = 0.0
    free_rows: int = 1
    devices: tuple[str, ...] = ()
    residents: Sequence[ResidentDrafter] = ()
    now: float = 0.0

    @property
    def opens(self) -> list[Open]:
        """Those of all frames."""
        return [opened for frame in self.frames for opened in frame.opens]

    def __post_init__(self) -> None:
        if not self.is_held:
            self.gate.set()
        self._is_begun = False
        self._num_links = 0
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def begin(self, description: WorkerDescription, settings: CoordinatorConfig) -> None:
        """Be the target that the description tells of; what it has begun as, it remains."""
        if self._is_begun:
            return
        self._is_begun = True
        inside = tuple(each.name for each in self.residents)
        self.description = replace(description, devices=self.devices, residents=inside)
        self.engine = self.make_engine()
        self.verifier = self.make_verifier()
        steps = Steps(
            self.engine,
            self.residents,
            max_texts=description.max_running_sequences,
            max_rows=description.max_batch_tokens,
            clock=lambda: self.now,
            verifier=self.verifier,
            config=settings,
            worker_id=description.worker_id,
        )
        self.loop, self.mailbox = steps.loop, steps.mailbox
        self.streams, self.texts = steps.streams, steps.texts

    def make_engine(self) -> PacedEngine:
        return PacedEngine(self, toy_law, VOCAB_SIZE)

    def make_verifier(self) -> ToyVerifier:
        return ToyVerifier(self)

    @property
    def contexts(self) -> dict[str, list[int]]:
        """What the engine holds, by the texts' names inside the target."""
        return self.engine.contexts if self._is_begun else {}

    @property
    def items(self) -> list[Item]:
        return [item for items in self.steps for item in items]

    def describe(self) -> WorkerDescription:
        self.begin(target_description(), FIXED)
        return self.description

    async def wait_for_frames(self, count: int) -> None:
        await self._until(lambda: len(self.frames) >= count)

    async def wait_for_steps(self, count: int) -> None:
        await self._until(lambda: len(self.steps) >= count)

    def beat(self) -> None:
        """Tell the coordinators which texts are here, as a worker does every second."""
        for stream in self.streams if self._is_begun and not self.is_mute else ():
            names = tuple(text.name for text in self.texts.of(stream))
            beat = Heartbeat(names, stream.heard)
            stream.post(VerdictFrame(heartbeat=beat, load=self.streams.load))
            if stream.counts:
                report, state = self.loop.report()
                stream.post(
                    VerdictFrame(
                        report=report, page=self.loop.recorder.render(), status=json.dumps(state)
                    )
                )

    def forget(self, request_id: str) -> None:
        """Know nothing more of a request, and say nothing of that."""
        for text in list(self.texts.values()):
            if text.opened.request_id == request_id:
                del self.texts[text.id]
                self.verifier.release([text.id])

    async def serve(self, link: TargetLink) -> None:
        self.begin(target_description(), FIXED)
        stream = self.streams.open(_Saying(self, link))
        self._num_links += 1
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            await run_until_first_ends(self._read_all(stream, link), stream.send_forever())
        except WorkerError:
            return
        finally:
            self.streams.close(stream)
            self._put(partial(self.texts.free, stream))
            self._num_links -= 1
            if not self._num_links:
                running, self._running = self._running, None
                running.cancel()
                self.mailbox.take(is_busy=True)
                self.loop.turn()
            await link.close()

    async def _run(self) -> None:
        """What the engine's thread does in a worker."""
        while True:
            if not self.loop.has_work:
                await self._wake.wait()
            self._wake.clear()
            await self.gate.wait()
            for _ in range(self.step_turns):
                await asyncio.sleep(0)
            await self.gate.wait()
            self.mailbox.take(is_busy=True)
            self.loop.turn()

    async def _read_all(self, stream: TargetStream, link: TargetLink) -> None:
        async for sent in link:
            frame = self.hears(sent)
            if frame is None:
                continue
            self.frames.append(frame)
            self.arrived.set()
            stream.hear(frame)
            self._put(partial(self.texts.apply, stream, frame))

    def _put(self, function: Callable[[], None]) -> None:
        self.mailbox.put(function)
        self._wake.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                self.arrived.clear()
                await self.arrived.wait()


class PacedEngine(ToyEngine):
    """Takes the time that its target says."""

    def __init__(self, toy: ToyTarget, law: Law, vocab_size: int) -> None:
        limit = toy.description.max_context_len or 4096
        super().__init__(law, vocab_size, limit, runs_ahead=False)  # its target notes each step
        self._toy = toy

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        toy = self._toy
        waiting = {name: work for name, work in self._queue.items() if toy.waits(name)}
        for name in waiting:
            del self._queue[name]
        outputs = super().step(taps)
        self._queue.update(waiting)
        outputs = [
            each if toy.keeps(each.request_id) else Output(each.request_id, have_len=0)
            for each in outputs
        ]
        num_rows = self.last_step.num_sequences + self.last_step.num_nodes
        toy.now += toy.step_s + toy.row_s * max(num_rows - toy.free_rows, 0)
        return outputs


class ToyVerifier(Verifier):
    """Notes what it is to verify, and does what its target is told to do wrong."""

    def __init__(self, toy: ToyTarget) -> None:
        super().__init__(toy.engine, clock=lambda: toy.now)
        self._toy = toy
        self.sound: list[Item] = []  # of the last ones, those that are not refused

    def submit(self, asked: Asked) -> dict[str, DrafthouseError]:
        refused = self.noted(asked)
        return refused | super().submit([(item.text, item.tree) for item in self.sound])

    def noted(self, asked: Asked) -> dict[str, DrafthouseError]:
        toy = self._toy
        items = [Item(text, tree, text.held_len, len(text.tokens)) for text, tree in asked]
        toy.steps.append(items)
        toy.arrived.set()
        refused = {each.request_id: error for each in items if (error := toy.refuses(each))}
        self.release(refused)
        self.sound = [item for item in items if item.request_id not in refused]
        return refused


class _Saying:
    """The target's end of a link, for what it says."""

    def __init__(self, toy: ToyTarget, link: TargetLink) -> None:
        self._toy = toy
        self._link = link

    async def send(self, frame: VerdictFrame) -> None:
        said = self._toy.says(frame)
        if said is not None:
            await self._link.send(said)

    def __aiter__(self) -> Any:
        return self._link.__aiter__()

    async def close(self) -> None:
        await self._link.close()
