"""A draft worker: one drafter, many links, and one thread that keeps growing trees.

The thread drains every commit that has arrived, then gives the drafter one bounded slice of
growth, and so on; it sleeps only when all trees are complete.  Links live on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cluster.core import Commit, Completion, DraftTask, Observation, Proposal
from cluster.draft.base import Drafter
from cluster.errors import WorkerError
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.rpc.link import Link
from cluster.worker.contained_drafter import ContainedDrafter
from cluster.worker.draft_lease import DrafterLoad, DraftLease
from cluster.worker.draft_names import (
    name_within,
    renamed_commit,
    renamed_observation,
    renamed_proposal,
    renamed_refusal,
)
from cluster.worker.priority import lower_priority

log = logging.getLogger(__name__)

# After so many failures in a row the drafter is at fault, not one request.
_UNHEALTHY_FAILURES = 16


@dataclass(slots=True, eq=False)
class _Request:
    """A request that the drafter holds, under its name within the drafter.

    generation, have_len: of the last commit that was taken in.  is_told: the coordinator knows that
    nothing else comes after that.
    """

    lease: DraftLease
    request_id: str
    offered: Proposal | None = None
    generation: int = 0
    have_len: int = 0
    is_told: bool = False


# What a link hands to the growth thread; None instead of a frame: the link has ended.
_Arrival = tuple[DraftLease, CommitFrame | None]


class DraftWorker:
    """Serves one drafter to any number of coordinators.

    State is leased to the link that created it and freed when the link ends.  Request ids are
    namespaced per link.  A drafter that raises is contained: the request concerned is reset and
    refused, everything else goes on.
    """

    def __init__(
        self,
        drafter: Drafter,
        description: WorkerDescription,
        clock: Callable[[], float] = time.perf_counter,
        *,
        nice: int = 0,
    ) -> None:
        """nice: the growth thread's nice value, 0 to 19.  The thread that reads commits keeps its
        priority, unless only the whole process can be lowered."""
        self._nice = nice
        self._drafter = ContainedDrafter(drafter, description.name, clock)
        self._description = description
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="draft-growth", daemon=True)
        # Shared between the event loop and the thread, under the condition.
        self._condition = threading.Condition()
        self._leases: set[DraftLease] = set()
        self._arrivals: deque[_Arrival] = deque()
        self._stopping = False
        self._idle = True
        # Owned by the thread.
        self._requests: dict[str, _Request] = {}
        self._wanted: dict[str, DraftTask] = {}
        # Commits that are still to be observed, and observations that are still to be sent.
        self._unobserved: list[tuple[DraftLease, Commit]] = []
        self._answers: dict[DraftLease, list[Observation]] = {}
        # Those of _wanted that may not be complete yet.
        self._growing: dict[str, DraftTask] = {}

    def describe(self) -> WorkerDescription:
        return self._description

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs and the drafter has not failed many times in a row."""
        return self._thread.is_alive() and self._drafter.num_failures < _UNHEALTHY_FAILURES

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current slice; open links end.  Idempotent."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until every commit is taken in and every tree complete; False at the timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: self._idle and not self._arrivals, timeout_s)

    # On the event loop

    async def serve(self, link: Link[ProposalFrame, CommitFrame]) -> None:
        """Serve one coordinator until the link ends or breaks, or the worker stops."""
        lease = DraftLease(next(self._numbers))
        with self._condition:
            self._leases.add(lease)
            if self._stopping:
                lease.finish()
        log.info("link opened drafter=%s link=%s", self._description.name, lease.number)
        reader = asyncio.create_task(self._read(lease, link))
        writer = asyncio.create_task(self._write(lease, link))
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except WorkerError as error:
            log.info(
                "link broke drafter=%s link=%s: %s", self._description.name, lease.number, error
            )
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            with self._condition:
                self._leases.discard(lease)
            self._hand((lease, None))
            await link.close()
            log.info("link ended drafter=%s link=%s", self._description.name, lease.number)

    async def _read(self, lease: DraftLease, link: Link[ProposalFrame, CommitFrame]) -> None:
        async for frame in link:
            lease.frame_handed()
            self._hand((lease, frame))
            await lease.room()

    async def _write(self, lease: DraftLease, link: Link[ProposalFrame, CommitFrame]) -> None:
        while (frame := await lease.next_frame()) is not None:
            await link.send(frame)

    def _hand(self, arrival: _Arrival) -> None:
        with self._condition:
            if self._stopping:
                return
            self._arrivals.append(arrival)
            self._drafter.interrupt()
            self._idle = False
            self._condition.notify_all()

    # In the growth thread

    def _run(self) -> None:
        try:
            lower_priority(self._nice)
            while (arrivals := self._take_arrivals()) is not None:
                for lease, frame in arrivals:
                    self._receive(lease, frame)
                self._observe()
                if self._growing:
                    self._grow()
                self._answer()
        finally:
            # Also on a defect of this loop: links must not hang on a dead thread.
            with self._condition:
                self._stopping = True
                self._idle = True
                self._arrivals.clear()
                leases = list(self._leases)
                self._condition.notify_all()
            self._drafter.release(list(self._requests))
            for lease in leases:
                lease.finish()

    def _take_arrivals(self) -> list[_Arrival] | None:
        """Wait for something to do, and return all that has arrived; None at the end."""
        with self._condition:
            if not self._arrivals and not self._growing:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._arrivals or self._stopping)
            if self._stopping:
                return None
            arrivals = list(self._arrivals)
            self._arrivals.clear()
            return arrivals

    def _receive(self, lease: DraftLease, frame: CommitFrame | None) -> None:
        if frame is None:
            self._unobserved = [entry for entry in self._unobserved if entry[0] is not lease]
            self._forget([name for name, each in self._requests.items() if each.lease is lease])
            self._report()
            return
        lease.frame_taken()
        # Before the commits: a full drafter has room for what comes in place of what ended, and a
        # commit for a request that is released in the same frame opens it anew.
        if frame.released:
            self._observe()
            lease.withdraw(frame.released)
            self._forget([name_within(lease.number, request_id) for request_id in frame.released])
        self._unobserved.extend((lease, commit) for commit in frame.commits)
        if frame.released:
            self._report()

    def _observe(self) -> None:
        """Take in the commits of all frames that have come meanwhile, together.

        A drafter that shares busy cores with the target gets to run when the target has nothing to
        do: then there is a backlog, and next to no time to work it off frame by frame.
        """
        commits, self._unobserved = self._unobserved, []
        if not commits:
            return
        answers = self._drafter.observe(
            [renamed_commit(lease.number, commit) for lease, commit in commits]
        )
        for (lease, commit), answer in zip(commits, answers, strict=True):
            if isinstance(answer, Refusal):
                self._drop(answer.request_id)
                named = renamed_refusal(answer, commit.request_id)
                lease.put(self._load(), self._drafter.busy_s, (), (), [named])
                continue
            observed = renamed_observation(answer, commit.request_id)
            self._answers.setdefault(lease, []).append(observed)
            if answer.have_len > 0:
                new = _Request(lease, commit.request_id)
                request = self._requests.setdefault(answer.request_id, new)
                request.generation, request.have_len = answer.generation, answer.have_len
                request.is_told = False
            taken = answer.generation == commit.generation  # else a former owner's, come late
            if taken and answer.have_len == commit.base_len + len(commit.token_ids):
                self._want(answer.request_id, commit)
        # What grows for these may finish others, whose work waited in the drafter.
        self._growing.update(self._wanted)

    def _answer(self) -> None:
        """Send the observations that were not sent with proposals."""
        answers, self._answers = self._answers, {}
        for lease, observations in answers.items():
            lease.put(self._load(), self._drafter.busy_s, (), observations)

    def _want(self, name: str, commit: Commit) -> None:
        """The drafter took the commit in: its tree may grow, if nodes are of use."""
        if commit.max_nodes > 0:
            task = DraftTask(name, commit.generation, commit.max_nodes)
            self._wanted[name] = self._growing[name] = task
        else:
            self._wanted.pop(name, None)
            self._growing.pop(name, None)

    def _grow(self) -> None:
        proposals, refusals = self._drafter.propose(list(self._growing.values()))
        offers: dict[DraftLease, list[Proposal]] = {}
        for proposal in proposals:
            request = self._requests.get(proposal.request_id)
            # An empty tree only says that growth goes on, and so does the former object.
            if request is None or proposal is request.offered or len(proposal.tree) == 0:
                continue
            request.offered = proposal
            request.is_told = proposal.is_complete
            renamed = renamed_proposal(proposal, request.request_id)
            offers.setdefault(request.lease, []).append(renamed)
        load = self._load()
        for lease, offered in offers.items():
            observations = self._answers.pop(lease, ())
            lease.put(load, self._drafter.busy_s, offered, observations)
        for refusal in refusals:
            request = self._drop(refusal.request_id)
            if request is not None:
                named = renamed_refusal(refusal, request.request_id)
                request.lease.withdraw([request.request_id])
                request.lease.put(self._load(), self._drafter.busy_s, (), (), [named])
        if not proposals:
            self._tell_complete(self._growing)
            self._growing.clear()
            self._report()

    def _tell_complete(self, names: Iterable[str]) -> None:
        """These trees grow no further; say so where no proposal did."""
        completions: dict[DraftLease, list[Completion]] = {}
        for name in names:
            request = self._requests.get(name)
            if request is None or request.is_told:
                continue
            request.is_told = True
            completion = Completion(request.request_id, request.generation, request.have_len)
            completions.setdefault(request.lease, []).append(completion)
        for lease, told in completions.items():
            observations = self._answers.pop(lease, ())
            lease.put(self._load(), self._drafter.busy_s, (), observations, completions=told)

    def _forget(self, names: Sequence[str]) -> None:
        self._drafter.release(names)
        for name in names:
            self._drop(name)
        # What was released may be what others could not grow without.
        self._growing.update(self._wanted)

    def _drop(self, name: str) -> _Request | None:
        self._wanted.pop(name, None)
        self._growing.pop(name, None)
        return self._requests.pop(name, None)

    def _load(self) -> DrafterLoad:
        return DrafterLoad(*self._drafter.pages, len(self._requests))

    def _report(self) -> None:
        """Tell every link what the drafter holds, where that changed since its last frame."""
        load = self._load()
        with self._condition:
            leases = list(self._leases)
        for lease in leases:
            lease.put(load, self._drafter.busy_s)
