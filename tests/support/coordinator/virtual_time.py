"""Time that passes only when everything that can happen without it has happened."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.errors import WorkerError
from cluster.messages import CommitFrame, ProposalFrame, StepReport, VerdictFrame, VerifyFrame
from cluster.rpc.link import Link
from tests.support.coordinator.toys import ToyDrafter, ToyTarget

# Turns of the event loop after which nothing more happens in a house of toys.
_TURNS = 40


@dataclass(eq=False)
class VirtualTimer:
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class VirtualTime:
    """A clock and a timer for the coordinator, and a sleep for the toys."""

    now: float = 1000.0
    _due: list[tuple[float, int, VirtualTimer]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> float:
        return self.now

    @property
    def num_pending(self) -> int:
        return sum(not timer.is_cancelled for _, _, timer in self._due)

    def timer(self, delay_s: float, callback: Callable[[], None]) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        awake = asyncio.Event()
        self.timer(delay_s, awake.set)
        await awake.wait()

    async def run_until(self, is_done: Callable[[], bool], max_events: int = 20_000) -> None:
        for _ in range(max_events):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
                if is_done():
                    return
            while self._due and self._due[0][2].is_cancelled:
                heapq.heappop(self._due)
            assert self._due, "nothing is left to happen"
            self.now, _, timer = heapq.heappop(self._due)
            timer.callback()
        raise AssertionError("it took too long")


@dataclass
class TimedTarget(ToyTarget):
    """Takes step_s for a step, whatever it verifies."""

    time: VirtualTime = field(default_factory=VirtualTime)
    step_s: float = 0.010

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                if frame.items:
                    await self.time.sleep(self.step_s)
                answer = self.answer(frame)
                assert answer.report is not None
                step_s = self.step_s if frame.items else 0.0
                await link.send(replace(answer, report=replace(answer.report, step_time_s=step_s)))
        except WorkerError:
            return
        finally:
            self.contexts.clear()


@dataclass
class TimedDrafter(ToyDrafter):
    """Answers every commit after delay_s, while it answers at all."""

    time: VirtualTime = field(default_factory=VirtualTime)
    delay_s: float = 0.001
    answers: Callable[[], bool] = lambda: True

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                if self.answers():
                    await self.time.sleep(self.delay_s)
                    await link.send(self.answer(frame))
        except WorkerError:
            return
        finally:
            self.contexts.clear()


@dataclass
class CostlyTarget(ToyTarget):
    """A step takes step_s, and row_s for each row beyond the first `free_rows`."""

    time: VirtualTime = field(default_factory=VirtualTime)
    step_s: float = 0.010
    row_s: float = 0.010
    free_rows: int = 1

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        try:
            async for frame in link:
                self.frames.append(frame)
                rows = sum(1 + len(item.tree) for item in frame.items)
                step_s = self.step_s + self.row_s * max(rows - self.free_rows, 0) if rows else 0.0
                await self.time.sleep(step_s)
                answer = self.answer(frame)
                assert isinstance(answer.report, StepReport)
                await link.send(replace(answer, report=replace(answer.report, step_time_s=step_s)))
        except WorkerError:
            return
        finally:
            self.contexts.clear()
