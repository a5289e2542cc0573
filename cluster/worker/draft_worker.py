"""A draft worker: one drafter, many links, and one thread that keeps growing trees.

The thread drains every commit that has arrived, then gives the drafter one bounded slice of
growth, and so on; it sleeps only when all trees are complete.  Links live on the event loop: a
link's writer takes frames of the newest news of each kind and request, so one that could not send
for a while sends only the last proposal of each request.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from cluster.core import Clock, Commit, Observation, Proposal, TokenTree
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.runner import Runner
from cluster.errors import WorkerError
from cluster.plan import autoscaling
from cluster.rpc.link import Link, run_until_first_ends
from cluster.rpc.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.worker.mailbox import LinkEnd, ThreadMail
from cluster.worker.priority import lower_priority

log = logging.getLogger(__name__)

DraftLink = Link[ProposalFrame, CommitFrame]
News = Proposal | Observation | Refusal
T = TypeVar("T", bound=News)

# After so many failures in a row the drafter is at fault, not one request.
_UNHEALTHY_FAILURES = 16


class DrafterLoad(NamedTuple):
    """KV pages (0 without an engine) and requests of the whole drafter."""

    pages_in_use: int = 0
    pages_total: int = 0
    num_requests: int = 0


class DraftLease(LinkEnd[ProposalFrame]):
    """One link's requests, and the news of them that it was not sent yet.

    load: the drafter's, as the link was told last."""

    # Each request has a few, for of each kind the newest is kept.
    what, max_unread = "notices", 2**16

    def __init__(self, number: int, link: DraftLink, take_time: Callable[[], float]) -> None:
        """number: the name space of the link's request ids.  take_time: returns the seconds of the
        drafter of which no link was told yet."""
        super().__init__(number, link)
        self.unread: dict[tuple[str, type[News]], News] = {}
        self.load = self._next_load = DrafterLoad()
        self._take_time = take_time

    def next_frame(self) -> ProposalFrame | None:
        """See `Outbox.next_frame`."""
        if not self.unread and self.load == self._next_load:
            return None
        news, self.load = [*self.unread.values()], self._next_load
        self.unread.clear()
        return ProposalFrame(
            _of(Proposal, news),
            _of(Observation, news),
            _of(Refusal, news),
            *self.load,
            self._take_time(),
        )

    def put(self, news: Iterable[News], load: DrafterLoad) -> None:
        """Tell with the next frame what the drafter says of the link's requests, and its load."""
        named = [_renamed(each, each.request_id.removeprefix(self.prefix)) for each in news]
        self._call_soon(self._put, named, load)

    def _put(self, news: Iterable[News], load: DrafterLoad) -> None:
        self.unread.update({(each.request_id, type(each)): each for each in news})
        self._next_load = load
        self.wake()


def _of(kind: type[T], news: Iterable[News]) -> tuple[T, ...]:
    return tuple(each for each in news if isinstance(each, kind))


def _renamed(news: News, request_id: str) -> News:
    """Return `news` under another id.

    A proposal gets its own arrays: in-process links pass references, and drafters reuse arrays.
    """
    if not isinstance(news, Proposal):
        return replace(news, request_id=request_id)
    return Proposal(
        request_id,
        int(news.generation),
        int(news.base_len),
        int(news.prefix_hash),
        TokenTree(news.tree.token_ids.copy(), news.tree.parents.copy()),
        news.survival.copy(),
        news.drafter,
        bool(news.is_complete),
    )


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
        clock: Clock = time.perf_counter,
        *,
        nice: int = 0,
    ) -> None:
        """nice: the growth thread's nice value, 0 to 19.  The thread that reads commits keeps its
        priority, unless only the whole process can be lowered."""
        self._nice = nice
        self._clock = clock
        breaker = CircuitBreaker(_UNHEALTHY_FAILURES, math.inf)
        self._runner = Runner(drafter, description.name, breaker, clock)
        self._description = description
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="draft-growth", daemon=True)
        # Shared between the event loop and the thread.
        self._mailbox = ThreadMail(self._runner.interrupt)
        self._leases: list[DraftLease] = []
        self._told_s = 0.0  # of the drafter's computing time: each second is told to one link
        self._former_pace = (0, 0)  # when `statistics` was last asked
        # Owned by the thread.
        self._untold: list[Commit] = []  # all names are those within the drafter
        self._offered: dict[str, Proposal] = {}
        self._news: list[News] = []
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
        return self._thread.is_alive() and self._runner.breaker.allows(self._clock())

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
        lease = DraftLease(next(self._numbers), link, self._take_time)
        self._leases.append(lease)
        if self._mailbox.is_closed:
            lease.finish()
        named = self._description.name, lease.number
        log.info("link opened drafter=%s link=%s", *named)
        try:
            reading = lease.read_forever(self._mailbox, self._receive)
            await run_until_first_ends(reading, lease.send_forever())
        except WorkerError as error:
            log.info("link broke drafter=%s link=%s: %s", *named, error)
        finally:
            self._leases.remove(lease)
            self._mailbox.put(partial(self._end, lease))
            await link.close()
            log.info("link ended drafter=%s link=%s", *named)

    def _take_time(self) -> float:
        busy_s = self._runner.busy_s
        untold_s, self._told_s = busy_s - self._told_s, busy_s
        return untold_s

    # In the growth thread

    def _run(self) -> None:
        runner = self._runner
        try:
            lower_priority(self._nice)
            while self._mailbox.take(is_busy=bool(runner.growing)):
                self._tell()
                if runner.growing:
                    self._grow()
                self._put()
        finally:
            # Also after a defect of this loop, so that links do not wait for a dead thread.
            self._mailbox.close()
            runner.release(list(runner.held))
            for lease in self._leases.copy():
                lease.finish()

    def _end(self, lease: DraftLease) -> None:
        of_link = lease.prefix
        self._untold = [each for each in self._untold if not each.request_id.startswith(of_link)]
        self._forget([name for name in self._runner.held if name.startswith(of_link)])

    def _receive(self, lease: DraftLease, frame: CommitFrame) -> None:
        # Before the commits: a full drafter then has room for the new requests, and a commit for a
        # request that is released in the same frame opens it anew.
        if frame.released:
            self._tell()
            self._forget([lease.inside(request_id) for request_id in frame.released])
        self._untold += [
            replace(each, request_id=lease.inside(each.request_id)) for each in frame.commits
        ]

    def _tell(self) -> None:
        """Tell the drafter the commits of all frames that have arrived, together.

        A drafter that shares busy cores with the target runs only while the target is idle.  Then
        there is a backlog, and too little time to process it frame by frame.
        """
        untold, self._untold = self._untold, []
        if not untold:
            return
        num_commits, num_late = self._pace
        num_late += sum(self._is_late(each.request_id) for each in untold)
        self._pace = num_commits + len(untold), num_late
        self._post(self._runner.tell(untold))
        self._runner.grow_again()

    def _is_late(self, name: str) -> bool:
        """True if the tree for the last commit has not begun to arrive, and may still do so."""
        held, offered = self._runner.held.get(name), self._offered.get(name)
        if held is None or name not in self._runner.growing:
            return False
        now = held.generation, held.have_len
        return offered is None or (offered.generation, offered.base_len) != now

    def _grow(self) -> None:
        proposals, refusals = self._runner.grow()
        for proposal in proposals:
            # An empty or unchanged tree only says that growth goes on, so it is not sent.
            name = proposal.request_id
            if proposal is not self._offered.get(name) and len(proposal.tree):
                self._offered[name] = proposal
                self._post([proposal])
        self._post(refusals)

    def _post(self, news: Sequence[News]) -> None:
        """Keep news, under the names within the drafter, for the links of their requests."""
        self._news += news
        for each in news:
            if isinstance(each, Refusal):
                self._offered.pop(each.request_id, None)

    def _put(self) -> None:
        """Hand every link its news, and the load of the whole drafter."""
        runner, is_idle = self._runner, not self._runner.growing
        self._load = DrafterLoad(*runner.pages, len(runner.held))
        news, self._news = self._news, []
        for lease in self._leases.copy():
            own = [each for each in news if each.request_id.startswith(lease.prefix)]
            # While trees grow, the pages in use change with each slice.
            if own or is_idle:
                lease.put(own, self._load)

    def _forget(self, names: Sequence[str]) -> None:
        self._runner.release(names)
        for name in names:
            self._offered.pop(name, None)
        self._runner.grow_again()
