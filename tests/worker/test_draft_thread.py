"""The draft worker's thread: commits that come during a slice, its end, and its time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence

from cluster.core import Commit, DraftTask, Observation, Proposal
from cluster.messages import ProposalFrame
from tests.support.worker.draft_peer import (
    PATIENCE_S,
    CountingDrafter,
    House,
    extension,
    house,
    opening,
    peer_of,
)


class Busy(CountingDrafter):
    """Its slices last while `gate` is closed; notes the commits of each call, and counts what is
    handed to its thread."""

    def __init__(self) -> None:
        super().__init__(slices=1)
        self.gate, self.began = threading.Event(), threading.Event()
        self.arrivals = threading.Semaphore(0)
        self.observed: list[list[int]] = []

    def interrupt(self) -> None:
        self.arrivals.release()

    async def handed(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.arrivals.acquire, timeout=PATIENCE_S)

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self.observed.append([commit.base_len for commit in commits])
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.began.set()
        assert self.gate.wait(PATIENCE_S)
        return super().propose(tasks)


async def test_frames_that_came_during_a_slice_are_taken_in_and_answered_together() -> None:
    drafter = Busy()
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        assert await asyncio.to_thread(drafter.began.wait, PATIENCE_S)
        await peer.send(extension("a", [1, 2], [3]), opening("b", [7]))
        await peer.send(extension("a", [1, 2, 3], [4]))
        await drafter.handed(3)
        drafter.gate.set()
        frame = await peer.until(lambda frame: any(p.base_len == 4 for p in frame.proposals))
        assert drafter.observed == [[0], [2, 0, 3]]
        assert {each.request_id: each.have_len for each in frame.observations} == {"a": 4, "b": 1}
        assert {each.request_id: each.base_len for each in frame.proposals} == {"a": 4, "b": 1}


async def test_of_a_link_that_ends_no_commit_is_taken_in_any_more() -> None:
    drafter = Busy()
    async with house(drafter) as running:
        stays, ends = running.connect(), running.connect()
        await stays.send(opening("a", [1, 2]))
        assert await asyncio.to_thread(drafter.began.wait, PATIENCE_S)
        await ends.send(opening("b", [7]))
        await ends.link.close()
        await drafter.handed(3)
        drafter.gate.set()
        await running.idle()
        assert list(drafter.texts) == ["1/a"]


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
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
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
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        assert (await peer.proposal("a")).base_len == 2
        await peer.send(extension("a", [1, 2], [3]))
        assert (await peer.proposal("a")).base_len == 3
    assert drafter.num_interrupts == 1


async def frames_of_two_links(running: House, drafter: CountingDrafter) -> list[ProposalFrame]:
    """All that two links are told, each of which has a text drafted and released.

    Either may be told of the drafter."""
    peers = {name: running.connect() for name in "ab"}
    for name, peer in peers.items():
        await peer.send(opening(name, [1]))
        await drafter.content()
    for name, peer in peers.items():
        await peer.send(released=[name])
    for peer in peers.values():
        await peer.until(lambda frame: frame.num_requests == 0)
    return [frame for peer in peers.values() for frame in peer.frames]


async def test_each_second_of_a_drafter_is_told_to_one_link() -> None:
    ticks, drafter = itertools.count(), CountingDrafter(slices=3)
    async with house(drafter, clock=lambda: float(next(ticks))) as running:
        frames = await frames_of_two_links(running, drafter)
    # For each text one observe and four proposes of one tick each.
    assert sum(frame.draft_time_s for frame in frames) == 10.0
