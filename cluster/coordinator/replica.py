"""One connected drafter replica: its link, what it must still be told, and its breaker."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster import metrics
from cluster.core import Commit, Request
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.told import told_params
from cluster.messages import CommitFrame, ProposalFrame, WorkerDescription
from cluster.metrics.recorder import Recorder
from cluster.rpc.link import Link
from cluster.spec.token_log import TokenLog

DrafterLink = Link[CommitFrame, ProposalFrame]


@dataclass(slots=True)
class Subscription:
    """One drafter replica's part of a session: what it was told, and what it answered.

    sent_len: tokens it has been sent.  base_len, generation: of the last commit, None before the
    first.  expected: lengths at the ends of commits that it has not answered yet.
    num_shortages: answers in a row that asked for tokens again.
    """

    replica: DrafterReplica
    sent_len: int = 0
    base_len: int | None = None
    generation: int | None = None
    num_shortages: int = 0
    expected: deque[int] = field(default_factory=lambda: deque(maxlen=64))


class Subscriber(Protocol):
    """A session, as far as a drafter is told of it."""

    id: str
    generation: int
    request: Request
    prompt_len: int
    tokens: TokenLog
    subscriptions: dict[str, Subscription]


class DrafterReplica:
    """Sends commits to one replica without ever making a token wait.

    Nothing is queued but the *names* of sessions with news: a frame is built when the link can
    take one, from what each session then is.  A slow replica gets fewer, longer commits, and its
    backlog is bounded by the number of its sessions.
    """

    def __init__(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: DrafterLink,
        breaker: CircuitBreaker,
        max_frame_tokens: int,
    ) -> None:
        self.name = name
        self.id = replica_id
        self.description = description
        self.devices = frozenset(description.devices)
        self.link = link
        self.breaker = breaker
        self.sessions: dict[str, Subscriber] = {}
        self._num_elsewhere = 0  # requests that it holds for other coordinators
        self.unanswered_since: float | None = None  # a frame was sent and nothing came back yet
        self._has_reported = False  # it has gauges of its own, of requests and of KV pages
        self._has_pages = False
        self._max_frame_tokens = max_frame_tokens
        self._news: dict[str, Subscriber] = {}
        self._max_nodes: dict[str, int] = {}  # what each session asks for
        self._told: set[str] = set()  # sessions that it may hold state of
        self._released: list[str] = []
        self._wake = asyncio.Event()

    @property
    def num_held(self) -> int:
        """Requests that it holds, as it last said and as was added since."""
        return self._num_elsewhere + len(self.sessions)

    def has_room(self) -> bool:
        limit = self.description.max_running_sequences
        return limit == 0 or self.num_held < limit

    def status(self, now: float) -> dict[str, object]:
        """A plain picture of the moment, for status reports."""
        return {
            "name": self.name,
            "id": self.id,
            "sessions": len(self.sessions),
            "breaker": self.breaker.state(now),
            "written_at": self.description.written_at,
        }

    def is_stalled(self, now: float, patience_s: float) -> bool:
        """True if it has owed an answer for so long."""
        since = self.unanswered_since
        return since is not None and now - since >= patience_s

    def mark(self, session: Subscriber, max_nodes: int | None = None) -> None:
        """There are tokens of `session` that the replica has not been sent.

        max_nodes: what it may grow from now on, 0 = nothing; None = as many as before.
        """
        self._news[session.id] = session
        if max_nodes is not None:
            self._max_nodes[session.id] = max_nodes
        self._wake.set()

    def forget(self, session_id: str) -> None:
        """The session ended or moved: tell the replica to free its state."""
        if self.sessions.pop(session_id, None) is None:
            return
        self._news.pop(session_id, None)
        self._max_nodes.pop(session_id, None)
        if session_id in self._told:
            self._told.discard(session_id)
            self._released.append(session_id)
            self._wake.set()

    def record(self, recorder: Recorder, frame: ProposalFrame) -> None:
        """Take note of what a frame says of the drafter as a whole."""
        if math.isfinite(frame.draft_time_s) and frame.draft_time_s > 0.0:
            recorder.add(metrics.DRAFT_TIME, frame.draft_time_s, drafter=self.name)
        self._num_elsewhere = max(frame.num_requests - len(self._told), 0)
        self._record_gauges(recorder, frame)

    def _record_gauges(self, recorder: Recorder, frame: ProposalFrame) -> None:
        labels = {"drafter": self.name, "worker": self.id}
        recorder.set(metrics.DRAFTER_REQUESTS, frame.num_requests, **labels)
        self._has_reported = True
        if frame.pages_total:
            worker = {"role": "drafter", "worker": self.id}
            recorder.set(metrics.KV_PAGES_IN_USE, frame.pages_in_use, **worker)
            recorder.set(metrics.KV_PAGES_TOTAL, frame.pages_total, **worker)
            self._has_pages = True

    def forget_gauges(self, recorder: Recorder) -> None:
        """Forget what a lost replica last said of itself: it is not true any more."""
        if self._has_reported:
            recorder.forget(metrics.DRAFTER_REQUESTS, drafter=self.name, worker=self.id)
        if self._has_pages:
            for gauge in (metrics.KV_PAGES_IN_USE, metrics.KV_PAGES_TOTAL):
                recorder.forget(gauge, role="drafter", worker=self.id)

    async def send_forever(self, clock: Callable[[], float]) -> None:
        """Send what there is to tell, for ever; raises WorkerError when the link is down."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (frame := self._next_frame()) is not None:
                if frame.commits and self.unanswered_since is None:
                    self.unanswered_since = clock()
                await self.link.send(frame)

    def _next_frame(self) -> CommitFrame | None:
        released = tuple(self._released)
        self._released.clear()
        commits: list[Commit] = []
        room = self._max_frame_tokens
        for session in list(self._news.values()):
            if room <= 0:
                break
            commit = self._commit(session, room)
            if commit is not None:
                commits.append(commit)
                self._told.add(session.id)
                room -= len(commit.token_ids)
        if not commits and not released:
            return None
        return CommitFrame(tuple(commits), released)

    def _commit(self, session: Subscriber, max_tokens: int) -> Commit | None:
        """The next commit of `session`, at most max_tokens long; None when it has all."""
        subscription: Subscription | None = session.subscriptions.get(self.name)
        if subscription is None or subscription.replica is not self:
            self._news.pop(session.id, None)
            return None
        base_len = subscription.sent_len
        end = min(len(session.tokens), base_len + max_tokens)
        if end == len(session.tokens):
            self._news.pop(session.id, None)
        if end == base_len and subscription.generation == session.generation:
            return None
        opens = base_len == 0 or subscription.generation != session.generation
        subscription.sent_len = end
        subscription.base_len = base_len
        subscription.generation = session.generation
        subscription.expected.append(end)
        max_nodes = self._max_nodes.get(session.id, 0)
        return Commit(
            request_id=session.id,
            generation=session.generation,
            base_len=base_len,
            prefix_hash=session.tokens.hash_at(base_len),
            token_ids=session.tokens.since(base_len, end),
            prompt_len=session.prompt_len,
            max_nodes=max_nodes,
            task=session.request.task,
            params=told_params(session.request.params, is_believed=False) if opens else None,
            tenant=session.request.tenant if opens else b"",
        )
