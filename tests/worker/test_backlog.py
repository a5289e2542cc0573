"""Commits that come while a slice of growth is under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from cluster.core import Commit, DraftTask, Observation, Proposal
from tests.support.worker.draft_peer import PATIENCE_S, CountingDrafter, extension, house, opening


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
    async with house(drafter) as running:
        peer = running.connect()
        await peer.send(opening("a", [1, 2]))
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
