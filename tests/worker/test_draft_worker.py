"""The draft worker over in-process links."""

import asyncio
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cluster.core import Commit, Observation, Proposal
from cluster.draft.base import DraftTask
from cluster.engine.engine import Engine
from cluster.spec.token_log import prefix_hash
from tests.draft.conftest import noisy_engine  # noqa: F401 - a fixture
from tests.support.draft.author import lm_drafter
from tests.support.worker.draft_peer import (
    PATIENCE_S,
    TEXT,
    CountingDrafter,
    extension,
    house,
    lookup,
    opening,
    peer_of,
)


async def test_a_commit_is_answered_with_an_observation_and_a_tree():
    async with peer_of(lookup(), opening("a", TEXT)) as peer:
        proposal = await peer.proposal("a")
        assert proposal.tree.token_ids.tolist()[:2] == [8, 9]
        assert (proposal.base_len, proposal.prefix_hash) == (8, prefix_hash(TEXT))
        assert proposal.is_complete
        observed = [each for frame in peer.frames for each in frame.observations]
        assert observed == [Observation("a", 1, 8)]
        await peer.send(extension("a", TEXT, [8]))
        proposal = await peer.proposal("a")
        assert (proposal.base_len, proposal.tree.token_ids[0]) == (9, 9)


async def test_growth_goes_on_until_the_tree_is_complete_and_then_sleeps():
    drafter = CountingDrafter(slices=5)
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        await drafter.content()
        await peer.house.idle()
        assert drafter.num_proposes == 6, "five slices that grew, one that had nothing to add"
        await peer.until(lambda f: any(len(p.tree) == 5 for p in f.proposals))
        await peer.send(extension("a", [1, 2], [3]))
        await drafter.content()
        await peer.house.idle()
        assert drafter.num_proposes == 12


async def test_two_links_may_use_the_same_request_id():
    async with house(lookup()) as running:
        first, second = running.connect(), running.connect()
        await first.send(opening("a", TEXT))
        await second.send(opening("a", [30, 31, 32, 30, 31]))
        assert (await first.proposal("a")).tree.token_ids[0] == 8
        assert (await second.proposal("a")).tree.token_ids[0] == 32
        await first.send(released=["a"])
        await first.until(lambda frame: frame.num_requests == 1)
        await second.send(extension("a", [30, 31, 32, 30, 31], [32]))
        assert (await second.proposal("a")).base_len == 6


async def test_a_release_is_reported_to_every_link_with_the_pages_it_freed(
    noisy_engine: Engine,  # noqa: F811
):
    async with house(lm_drafter(noisy_engine)) as running:
        first, second = running.connect(), running.connect()
        await first.send(opening("a", list(range(10, 40))))
        await first.proposal("a")
        await running.idle()
        await second.until(lambda frame: frame.num_requests == 1 and frame.pages_in_use > 0)
        await first.send(released=["a"])
        for peer in (first, second):
            frame = await peer.until(lambda frame: frame.num_requests == 0)
            assert (frame.pages_in_use, frame.pages_total) == (0, noisy_engine.pages_total)
            assert not frame.proposals


async def test_the_end_of_a_link_frees_what_it_leased(noisy_engine: Engine):  # noqa: F811
    async with house(lm_drafter(noisy_engine)) as running:
        stays, closes, breaks = running.connect(), running.connect(), running.connect()
        for peer in (stays, closes, breaks):
            await peer.send(opening("a", list(range(10, 40))))
            await peer.proposal("a")
        await closes.link.close()
        breaks.link.sever()
        await stays.send(released=["a"])
        # No link hears of each load: they are told while nothing grows.
        await stays.until(lambda frame: frame.num_requests == 0 and frame.pages_in_use == 0)
        assert noisy_engine.pages_in_use == 0


async def test_commits_and_releases_are_taken_in_while_growth_never_ends():
    drafter = CountingDrafter(slices=10**9)
    async with peer_of(drafter, opening("a", [1]), opening("b", [2])) as peer:
        await peer.proposal("a")
        await peer.send(extension("a", [1], [7]))
        await peer.until(lambda f: any(p.base_len == 2 for p in f.proposals))
        await peer.send(released=["a"])
        await peer.until(lambda frame: frame.num_requests == 1)
        assert "1/a" in drafter.released
        peer.frames.clear()
        await peer.proposal("b")
        assert all(p.request_id == "b" for frame in peer.frames for p in frame.proposals)
        await peer.send(released=["b"])
        await peer.until(lambda frame: frame.num_requests == 0)
        await peer.house.idle()


async def test_a_link_that_is_backed_up_gets_only_the_newest_of_each_request():
    drafter = CountingDrafter(slices=40)
    async with house(drafter) as running:
        peer = running.connect(window=1)
        for round_index in range(5):
            before = list(range(round_index))
            commit = extension("a", before, [round_index]) if before else opening("a", [0])
            await peer.send(commit)
            await drafter.content()
        frames = [await peer.read()]
        while not any(len(p.tree) == 40 and p.base_len == 5 for p in frames[-1].proposals):
            frames.append(await peer.read())
        assert drafter.num_proposes > 5 * 40
        assert len(frames) <= 4, "one that was sent, one in hand, one with the newest of all"
        assert all(len(frame.proposals) <= 1 for frame in frames)


async def test_growth_that_is_under_way_ends_when_no_nodes_are_wanted_any_more():
    drafter = CountingDrafter(slices=10**9)
    async with peer_of(drafter, opening("a", [1, 2])) as peer:
        assert len((await peer.proposal("a")).tree) > 0
        await peer.send(replace(extension("a", [1, 2], [3]), max_nodes=0))
        await peer.house.idle()
        count = drafter.num_proposes
        await peer.send(replace(extension("a", [1, 2, 3], [4]), max_nodes=0))
        await peer.house.idle()
        assert drafter.num_proposes == count


async def test_stopping_the_worker_ends_its_links_and_frees_everything():
    drafter = CountingDrafter(slices=10**9)
    async with house(drafter) as running:
        busy, silent = running.connect(), running.connect()
        await busy.send(opening("a", [1]))
        await busy.proposal("a")
        await asyncio.to_thread(running.worker.stop)
        for peer in (busy, silent):
            await peer.end()
        assert drafter.texts == {}
        assert not running.worker.is_healthy
        await running.connect().end()


class OneAtATime(CountingDrafter):
    """Room for one tree: others grow when the oldest request has been released."""

    def _grow(self, name: str) -> bool:
        return name == next(iter(self.texts), None) and super()._grow(name)


class Following(CountingDrafter):
    """The tree of "b" grows only once "a" has two tokens: its work waited in the drafter."""

    def _grow(self, name: str) -> bool:
        may_grow = not name.endswith("/b") or len(self.texts["1/a"]) > 1
        return may_grow and super()._grow(name)


@pytest.mark.parametrize(
    ("kind", "commits", "released"),
    [(OneAtATime, [], ["a"]), (Following, [extension("a", [1], [3])], [])],
    ids=["release", "commit"],
)
async def test_what_is_told_of_one_request_lets_others_grow_that_waited_for_it(
    kind: type[CountingDrafter], commits: list[Commit], released: list[str]
):
    drafter = kind(slices=2)
    async with peer_of(drafter, opening("a", [1]), opening("b", [2])) as peer:
        await drafter.content()
        await peer.house.idle()
        assert drafter.grown["1/b"] == 0
        await peer.send(*commits, released=released)
        assert (await peer.proposal("b")).base_len == 1


async def test_growth_stands_back_and_the_hearing_of_commits_does_not():
    nices = []

    class NotingDrafter(CountingDrafter):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
            nices.append(os.nice(0))
            return super().propose(tasks)

    before = os.nice(0)
    async with peer_of(NotingDrafter(), opening("a", TEXT), nice=3) as peer:
        await peer.proposal("a")
        assert os.nice(0) == before
    assert set(nices) == {min(before + 3, 19)}


# The draft worker's thread: commits that come during a slice, its end, and its time.


class Busy(CountingDrafter):
    """Its slices last while `gate` is closed; notes the commits of each call, and counts what is
    handed to its thread."""

    def __init__(self) -> None:
        super().__init__(slices=1)
        self.gate, self.began = threading.Event(), threading.Event()
        self.arrivals = threading.Semaphore(0)
        self.observed = []

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


async def test_frames_interrupt_a_slice_and_are_taken_in_and_answered_together():
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


async def test_of_a_link_that_ends_no_commit_is_taken_in_any_more():
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


async def test_each_second_of_a_drafter_is_told_to_one_link():
    """Either may be told of the drafter."""
    ticks, drafter = itertools.count(), CountingDrafter()
    async with house(drafter, clock=lambda: float(next(ticks))) as running:
        peers = {name: running.connect() for name in "ab"}
        for name, peer in peers.items():
            await peer.send(opening(name, [1]))
            await drafter.content()
        for name, peer in peers.items():
            await peer.send(released=[name])
        for peer in peers.values():
            await peer.until(lambda frame: frame.num_requests == 0)
    # For each text one observe and four proposes of one tick each.
    told = [frame.draft_time_s for peer in peers.values() for frame in peer.frames]
    assert sum(told) == 10.0
