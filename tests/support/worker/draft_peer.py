"""The coordinator's end of a draft link, and drafters that behave by rule."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.core import Commit, Observation, Proposal, TokenTree
from cluster.draft.base import Drafter, DrafterContext, DraftTask
from cluster.draft.suffix import PromptLookupOptions, SuffixDrafter
from cluster.rpc.link import Link, memory_pair
from cluster.rpc.messages import CommitFrame, ProposalFrame, WorkerDescription
from cluster.spec.token_log import prefix_hash
from cluster.worker.draft_worker import DraftWorker
from tests.support.draft.author import Author

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]
DESCRIPTION = WorkerDescription("d-1", "drafter", "toy")
# Far above what any test needs; only a defect gets there.
PATIENCE_S = 20.0


def lookup(max_requests: int = 8) -> SuffixDrafter:
    return SuffixDrafter(DrafterContext("lookup", 8, max_requests), PromptLookupOptions())


def opening(request_id: str, tokens: Sequence[int], **fields: Any) -> Commit:
    author = Author(tokens, request_id=request_id, max_nodes=8)
    return replace(author.opening(), **fields)


def extension(request_id: str, before: Sequence[int], tokens: Sequence[int]) -> Commit:
    author = Author(before, request_id=request_id, max_nodes=8)
    author.opening()
    return author.commit(tokens)


class Peer:
    """Sends commits, keeps every frame that comes back.  house: the worker's."""

    house: House

    def __init__(self, link: Link[Any, Any]) -> None:
        self.link = link
        self.frames: list[ProposalFrame] = []

    async def send(self, *commits: Commit, released: Sequence[str] = ()) -> None:
        await self.link.send(CommitFrame(commits, tuple(released)))

    async def read(self) -> ProposalFrame:
        async with asyncio.timeout(PATIENCE_S):
            frame: ProposalFrame = await anext(aiter(self.link))
        self.frames.append(frame)
        return frame

    async def end(self) -> None:
        """Read until the worker has closed the link."""
        async with asyncio.timeout(PATIENCE_S):
            async for frame in self.link:
                self.frames.append(frame)

    async def until(self, wanted: Callable[[ProposalFrame], bool]) -> ProposalFrame:
        while not wanted(frame := await self.read()):
            pass
        return frame

    async def proposal(self, request_id: str) -> Proposal:
        """The first proposal for the request in frames not read yet."""
        while True:
            for proposal in (await self.read()).proposals:
                if proposal.request_id == request_id:
                    return proposal


class House:
    """A running worker and its links."""

    def __init__(self, drafter: Drafter, **settings: Any) -> None:
        self.worker = DraftWorker(drafter, DESCRIPTION, **settings)
        self.serving: list[asyncio.Task[None]] = []

    def connect(self, window: int = 64) -> Peer:
        here, there = memory_pair(window)
        self.serving.append(asyncio.create_task(self.worker.serve(there)))
        return Peer(here)

    async def idle(self) -> None:
        """Wait until every commit is taken in and every tree complete, or the thread has ended."""
        num_quiet = 0
        # The mail that arrived before the first call is processed before the second call runs.
        while num_quiet < 2:
            is_growing = self.worker._mailbox.call(lambda: bool(self.worker._runner.growing))
            if is_growing.cancelled():
                return
            try:
                waited = await asyncio.wait_for(asyncio.wrap_future(is_growing), PATIENCE_S)
            except asyncio.CancelledError:
                if not is_growing.cancelled():
                    raise
                return
            num_quiet = 0 if waited else num_quiet + 1


@asynccontextmanager
async def house(drafter: Drafter, **settings: Any) -> AsyncIterator[House]:
    running = House(drafter, **settings)
    running.worker.start()
    try:
        yield running
    finally:
        await asyncio.to_thread(running.worker.stop)
        await asyncio.wait_for(asyncio.gather(*running.serving), PATIENCE_S)


@asynccontextmanager
async def peer_of(drafter: Drafter, *commits: Commit, **settings: Any) -> AsyncIterator[Peer]:
    """A coordinator of a running worker, which has sent these commits in a frame."""
    async with house(drafter, **settings) as running:
        peer = running.connect()
        peer.house = running
        if commits:
            await peer.send(*commits)
        yield peer


class CountingDrafter:
    """Holds lengths only; every slice adds a node to each tree, up to `slices` of them."""

    def __init__(self, slices: int = 3) -> None:
        self.slices = slices
        self.texts: dict[str, list[int]] = {}
        self.grown: dict[str, int] = {}
        self.num_proposes = 0
        self.released: list[str] = []
        self._content = threading.Semaphore(0)

    async def content(self) -> None:
        """Wait until a propose had nothing to add; every such call ends one wait."""
        assert await asyncio.to_thread(self._content.acquire, timeout=PATIENCE_S)

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        return [self._observe(commit) for commit in commits]

    def _observe(self, commit: Commit) -> Observation:
        name = commit.request_id
        text = self.texts.get(name, [])[: commit.base_len]
        if len(text) == commit.base_len:
            self.texts[name] = text = [*text, *commit.token_ids.tolist()]
            self.grown[name] = 0
        return Observation(name, commit.generation, len(text))

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.num_proposes += 1
        proposals = [self._proposal(task) for task in tasks if self._grow(task.request_id)]
        if not proposals:
            self._content.release()
        return proposals

    def _grow(self, name: str) -> bool:
        if name not in self.texts or self.grown[name] >= self.slices:
            return False
        self.grown[name] += 1
        return True

    def _proposal(self, task: DraftTask) -> Proposal:
        text, size = self.texts[task.request_id], min(self.grown[task.request_id], 50)
        return Proposal(
            task.request_id,
            task.generation,
            len(text),
            prefix_hash(text),
            TokenTree.chain(list(range(size))),
            np.ones(size, np.float32),
            "toy",
        )

    def release(self, request_ids: Sequence[str]) -> None:
        self.released.extend(request_ids)
        for name in request_ids:
            self.texts.pop(name, None)
