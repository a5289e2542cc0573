"""A draft worker: one drafter, many links, and one thread that keeps growing trees.

The thread drains every commit that has arrived, then gives the drafter one bounded slice of
growth, and so on; it sleeps only when all trees are complete.  Links live on the event loop.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.core import Commit, DraftTask, Observation, Proposal
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.drafting import Drafting
from cluster.errors import WorkerError
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.plan import autoscaling
from cluster.rpc.duplex import run_until_first_ends
from cluster.rpc.link import Link
from cluster.worker.lease import DrafterLoad, DraftLease, News, renamed
from cluster.worker.mailbox import ThreadMail
from cluster.worker.priority import lower_priority

log = logging.getLogger(__name__)

# After so many failures in a row the drafter is at fault, not one request.
_UNHEALTHY_FAILURES = 16

DraftLink = Link[ProposalFrame, CommitFrame]


@dataclass(slots=True, eq=False)
class _Request:
    """A request that the drafter holds.  request_id: its coordinator's name for it.

    task: the tree that is wanted, complete or not.  is_answered: a tree for the last commit was
    sent.
    """

    lease: DraftLease
    request_id: str
    task: DraftTask | None = None
    offered: Proposal | None = None
    is_answered: bool = False


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
        self._clock = clock
        self._breaker = CircuitBreaker(_UNHEALTHY_FAILURES, math.inf)
        self._drafting = Drafting(drafter, description.name, self._breaker, clock)
        self._description = description
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="draft-growth", daemon=True)
        # Shared between the event loop and the thread.
        self._mailbox = ThreadMail[DraftLease, CommitFrame]()
        self._leases: set[DraftLease] = set()
        self._former_pace = (0, 0)  # when `statistics` was last asked
        # Owned by the thread.
        self._requests: dict[str, _Request] = {}  # by the names within the drafter
        self._untold: list[tuple[DraftLease, Commit]] = []
        self._news: defaultdict[DraftLease, list[News]] = defaultdict(list)  # not put yet
        self._told_s = 0.0  # of the drafter's computing time: each second is told to one link
        self._load = DrafterLoad()
        self._pace = (0, 0)  # commits, and those of them that were late

    def describe(self) -> WorkerDescription:
        return self._description

    @property
    def has_links(self) -> bool:
        """True if a coordinator has it draft."""
        return bool(self._leases)

    @property
    def is_healthy(self) -> bool:
        """True while the thread runs and the drafter has not failed many times in a row."""
        return self._thread.is_alive() and self._breaker.allows(self._clock())

    def statistics(self) -> dict[str, float]:
        """Return what its autoscaling is to know; shares are of the time since the last call."""
        load, pace, former = self._load, self._pace, self._former_pace
        self._former_pace = pace
        num_commits, num_late = pace[0] - former[0], pace[1] - former[1]
        return {
            autoscaling.TEXTS: load.num_requests,
            autoscaling.PLACES: self._description.max_running_sequences,
            autoscaling.KV_USE: load.pages_in_use / max(load.pages_total, 1),
            autoscaling.LATE: num_late / max(num_commits, 1),
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after its current slice; open links end.  Idempotent."""
        self._mailbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # On the event loop

    def renew_links(self) -> None:
        """End the open links: each coordinator connects again, and asks anew who this is."""
        for lease in self._leases:
            lease.finish()

    async def serve(self, link: DraftLink) -> None:
        """Serve one coordinator until the link ends or breaks, or the worker stops."""
        lease = DraftLease(next(self._numbers))
        self._leases.add(lease)
        if self._mailbox.is_closed:
            lease.finish()
        named = self._description.name, lease.number
        log.info("link opened drafter=%s link=%s", *named)
        try:
            await run_until_first_ends(self._read(lease, link), lease.send_forever(link))
        except WorkerError as error:
            log.info("link broke drafter=%s link=%s: %s", *named, error)
        finally:
            self._leases.discard(lease)
            self._hand(lease, None)
            await link.close()
            log.info("link ended drafter=%s link=%s", *named)

    async def _read(self, lease: DraftLease, link: DraftLink) -> None:
        async for frame in link:
            lease.check_read()
            await lease.frame_handed()
            self._hand(lease, frame)

    def _hand(self, lease: DraftLease, frame: CommitFrame | None) -> None:
        self._mailbox.put(lease, frame)
        self._drafting.interrupt()

    # In the growth thread

    def _run(self) -> None:
        drafting = self._drafting
        try:
            lower_priority(self._nice)
            while (mail := self._mailbox.take(is_busy=bool(drafting.growing))) is not None:
                for lease, frame in mail:
                    self._receive(lease, frame)
                self._tell()
                if drafting.growing:
                    self._grow()
                self._put()
        finally:
            # Also after a defect of this loop, so that links do not wait for a dead thread.
            self._mailbox.close()
            drafting.release(list(self._requests))
            for lease in self._leases.copy():
                lease.finish()

    def _receive(self, lease: DraftLease, frame: CommitFrame | None) -> None:
        if frame is None:
            self._untold = [entry for entry in self._untold if entry[0] is not lease]
            self._forget([name for name, each in self._requests.items() if each.lease is lease])
            return
        # Before the commits: a full drafter then has room for the new requests, and a commit for a
        # request that is released in the same frame opens it anew.
        if frame.released:
            self._tell()
            lease.withdraw(frame.released)
            self._forget([lease.inside(request_id) for request_id in frame.released])
        self._untold.extend((lease, commit) for commit in frame.commits)

    def _tell(self) -> None:
        """Tell the drafter the commits of all frames that have arrived, together.

        A drafter that shares busy cores with the target runs only while the target is idle.  Then
        there is a backlog, and too little time to process it frame by frame.
        """
        untold, self._untold = self._untold, []
        if not untold:
            return
        drafting = self._drafting
        num_commits, num_late = self._pace
        late = [self._is_late(lease.inside(commit.request_id)) for lease, commit in untold]
        self._pace = num_commits + len(late), num_late + sum(late)
        answers = drafting.tell([lease.named(commit) for lease, commit in untold])
        for (lease, commit), answer in zip(untold, answers, strict=True):
            name = commit.request_id
            if isinstance(answer, Refusal):
                self._requests.pop(answer.request_id, None)
                self._news[lease].append(replace(answer, request_id=name))
                continue
            self._news[lease].append(Observation(name, answer.generation, answer.have_len))
            if answer.have_len > 0:
                request = self._requests.setdefault(answer.request_id, _Request(lease, name))
                request.task = drafting.growing.get(answer.request_id)
                request.is_answered = False
        self._grow_again()

    def _is_late(self, name: str) -> bool:
        """True if the tree for the last commit has not begun to arrive, and may still do so."""
        request = self._requests.get(name)
        return request is not None and not request.is_answered and name in self._drafting.growing

    def _grow(self) -> None:
        proposals, refusals = self._drafting.grow()
        for proposal in proposals:
            request = self._requests.get(proposal.request_id)
            # An empty or unchanged tree only says that growth goes on, so it is not sent.
            if request is None or proposal is request.offered or len(proposal.tree) == 0:
                continue
            request.offered, request.is_answered = proposal, True
            self._news[request.lease].append(renamed(proposal, request.request_id))
        for refusal in refusals:
            request = self._requests.pop(refusal.request_id, None)
            if request is not None:
                named = replace(refusal, request_id=request.request_id)
                self._news[request.lease].append(named)

    def _put(self) -> None:
        """Hand every link its news, and the load of the whole drafter."""
        drafting, is_idle = self._drafting, not self._drafting.growing
        news, self._news = self._news, defaultdict(list)
        load = self._load = DrafterLoad(*drafting.pages, len(drafting.held))
        for lease in self._leases.copy():
            # While trees grow, the pages in use change with each slice.
            if news[lease] or (is_idle and load != lease.load):
                lease.put(news[lease], load, drafting.busy_s - self._told_s)
                self._told_s = drafting.busy_s

    def _forget(self, names: Sequence[str]) -> None:
        self._drafting.release(names)
        for name in names:
            self._requests.pop(name, None)
        self._grow_again()

    def _grow_again(self) -> None:
        """Ask for all trees once more: some may have waited for what was told or released."""
        self._drafting.growing.update(
            (name, each.task) for name, each in self._requests.items() if each.task is not None
        )
