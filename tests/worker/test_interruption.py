"""A commit ends the slice of growth that is under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from cluster.core import DraftTask, Proposal
from tests.support.worker.draft_peer import PATIENCE_S, CountingDrafter, extension, house, opening


class Slow(CountingDrafter):
    """Its slices last until a commit arrives."""

    def __init__(self) -> None:
        super().__init__(slices=1)
        self.interrupted, self.began = threading.Event(), threading.Event()
        self.has_waited = False

    def interrupt(self) -> None:
        self.interrupted.set()

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        if self.num_proposes == 0:
            self.interrupted.clear()
            self.began.set()
            self.has_waited = self.interrupted.wait(PATIENCE_S)
        return super().propose(tasks)


async def test_a_commit_interrupts_the_slice_under_way() -> None:
    drafter = Slow()
    async with house(drafter) as running:
        peer = running.connect()
        await peer.send(opening("a", [1, 2]))
        assert await asyncio.to_thread(drafter.began.wait, PATIENCE_S)
        await peer.send(extension("a", [1, 2], [3]))
        await drafter.content()
        assert drafter.has_waited
        assert drafter.texts["1/a"] == [1, 2, 3]


class RaisingAtInterrupts(CountingDrafter):
    num_interrupts = 0

    def interrupt(self) -> None:
        self.num_interrupts += 1
        raise RuntimeError("a plug-in's defect")


async def test_a_drafter_that_raises_when_interrupted_goes_on_without() -> None:
    drafter = RaisingAtInterrupts()
    async with house(drafter) as running:
        peer = running.connect()
        await peer.send(opening("a", [1, 2]))
        assert (await peer.proposal("a")).base_len == 2
        await peer.send(extension("a", [1, 2], [3]))
        assert (await peer.proposal("a")).base_len == 3
    assert drafter.num_interrupts == 1
