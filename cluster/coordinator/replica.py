"""Connected drafter replicas: their links, what they must still be told, and their breakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.workers import Worker
from cluster.core import Clock, Commit, Observation, Proposal
from cluster.draft.base import told_params
from cluster.draft.breaker import CircuitBreaker
from cluster.plan.texts import MAX_LAG
from cluster.rpc.link import Link
from cluster.rpc.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription

DrafterLink = Link[CommitFrame, ProposalFrame]

# Nodes that a pool drafter is asked for (and a target sent), of one text and of all of a target:
# broader trees more often go on behind the next commits; but the coordinator reads all of it.
POOL_NODES = 64
_POOL_NODES_OF_ALL = 512
# Steps without a verified draft after which a drafter is told less.
_UNUSED_STEPS = 8


@dataclass(slots=True, eq=False)
class Subscription:
    """One drafter replica's part of a session: what it was told, and what it answered.

    max_nodes: that it may grow, 0 = nothing.  sent_len: tokens it has been sent; known_len: of
    them, the most that it has said it has.  base_len, generation: of the last commit; generation is
    None before the first.  num_shortages: answers in a row that asked for tokens again.
    num_unused: steps since a draft of it was last verified for the text.
    """

    session: Session
    replica: DrafterReplica
    max_nodes: int = 0
    sent_len: int = 0
    known_len: int = 0
    base_len: int = 0
    generation: int | None = None
    num_shortages: int = 0
    num_unused: int = 0

    @property
    def has_all(self) -> bool:
        """True if it was sent all tokens."""
        session = self.session
        return self.sent_len == len(session.tokens) and self.generation == session.generation

    def nodes_to_ask(self, config: CoordinatorConfig, num_texts: int) -> int:
        """How many nodes it may grow behind the next commit, of so many texts; it always may some.

        A model keeps what it has grown; look-ups would build a broad tree anew each time.
        """
        most = POOL_NODES if self.session.text.max_draft_tokens else 0
        if self.replica.description.model_hash or config.budget != "adaptive":
            return most  # beyond what a step takes, for the rest survives the re-rooting
        return min(max(_POOL_NODES_OF_ALL // num_texts, 1), most)

    def commit_lag(self, config: CoordinatorConfig, num_texts: int, *, is_shared: bool) -> int:
        """Tokens that may be kept back from it, and one: 1 = none.

        Reading its trees costs time, in a crowd above all.  is_shared: it drafts on the target's
        cores.
        """
        beside, num_unused = self.session.text.beside, self.num_unused
        is_compared = self.replica.name in (*beside, *beside.values())
        if config.budget != "adaptive" or num_unused < _UNUSED_STEPS or is_compared:
            return 1
        # On the target's cores a commit costs as much as some tokens: fewer and fewer are sent.
        if is_shared:
            return min(num_unused, MAX_LAG)
        return min(max(num_texts // 2, 1), _UNUSED_STEPS)

    def next_commit(self, max_tokens: int) -> Commit:
        """Return what it was not sent, at most max_tokens of it."""
        session, request, base_len = self.session, self.session.request, self.sent_len
        opens = base_len == 0 or self.generation != session.generation
        self.base_len, self.generation = base_len, session.generation
        self.sent_len = min(len(session.tokens), base_len + max_tokens)
        return Commit(
            request_id=session.id,
            generation=session.generation,
            base_len=base_len,
            prefix_hash=session.tokens.hash_at(base_len),
            token_ids=session.tokens.since(base_len, self.sent_len),
            prompt_len=session.prompt_len,
            max_nodes=self.max_nodes,
            task=request.task,
            params=told_params(request.params, is_believed=False) if opens else None,
            tenant=request.tenant if opens else b"",
        )


class DrafterReplica(Worker[CommitFrame]):
    """Sends commits to one replica without ever making a token wait.

    Nothing is queued but the *names* of sessions with news: a frame is built from what each session
    is when it is sent.  A slow replica gets fewer, longer commits, and its
    backlog is bounded by the number of its sessions.

    subscriptions: by the id of the session.  num_requests: that it last said it holds.
    unanswered_since: a frame was sent and nothing came back yet.
    """

    def __init__(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: DrafterLink,
        breaker: CircuitBreaker,
        max_frame_tokens: int,
        clock: Clock,
    ) -> None:
        super().__init__(replica_id, description, link)
        self.name = name
        self.breaker = breaker
        self.subscriptions: dict[str, Subscription] = {}
        self.num_requests = 0
        self.unanswered_since: float | None = None
        self._num_elsewhere = 0  # requests that it holds for other coordinators
        self._max_frame_tokens = max_frame_tokens
        self._clock = clock
        self._news: dict[str, Subscription] = {}
        self._released: list[str] = []

    @property
    def num_held(self) -> int:
        """Requests that it holds, as it last said and as was added since."""
        return self._num_elsewhere + len(self.subscriptions)

    def has_room(self) -> bool:
        limit = self.description.max_running_sequences
        return limit == 0 or self.num_held < limit

    def shares_devices(self, seat: TargetSeat) -> bool:
        """True if its computing slows the target down, as far as their devices are known."""
        return not set(self.description.devices).isdisjoint(seat.description.devices)

    def status(self) -> dict[str, Any]:
        """A plain picture of the moment, for status reports."""
        return {
            "name": self.name,
            "id": self.id,
            "sessions": len(self.subscriptions),
            "breaker": self.breaker.state(self._clock()),
            "written_at": self.description.written_at,
        }

    @property
    def is_stalled(self) -> bool:
        """True if it has owed an answer for too long."""
        since = self.unanswered_since
        return since is not None and self._clock() - since >= self.breaker.reset_s

    def current(self, said: Proposal | Observation | Refusal) -> Subscription | None:
        """Return the subscription that it speaks of; None if that is over, or begun anew."""
        found = self.subscriptions.get(said.request_id)
        is_current = found is not None and found.session.generation == said.generation
        return found if is_current else None

    def subscribe(self, session: Session) -> Subscription:
        """It drafts for `session` from now on."""
        found = session.subscriptions[self.name] = Subscription(session, self)
        self.subscriptions[session.id] = found
        return found

    def mark(self, subscription: Subscription) -> None:
        """There are tokens that the replica has not been sent."""
        self._news[subscription.session.id] = subscription
        self.wake()

    def forget(self, session: Session) -> None:
        """The session ended or moved: tell the replica to free its state."""
        session.text.held.pop(self.name, None)
        session.subscriptions.pop(self.name, None)
        own = self.subscriptions.pop(session.id, None)
        self._news.pop(session.id, None)
        if own is not None and own.generation is not None:
            self._released.append(session.id)
            self.wake()

    def note_held(self, frame: ProposalFrame) -> None:
        """Take note of what a frame says of the drafter as a whole."""
        self.unanswered_since = None
        num_told = sum(each.generation is not None for each in self.subscriptions.values())
        self._num_elsewhere = max(frame.num_requests - num_told, 0)
        self.num_requests = frame.num_requests
        if frame.pages_total:
            self.pages = frame.pages_in_use, frame.pages_total

    def next_frame(self) -> CommitFrame | None:
        released = tuple(self._released)
        self._released.clear()
        commits: list[Commit] = []
        room = self._max_frame_tokens
        for name, own in list(self._news.items()):
            if room <= 0:
                break
            if not own.has_all:
                commits.append(own.next_commit(room))
                room -= len(commits[-1].token_ids)
            if own.has_all:
                del self._news[name]
        if commits and self.unanswered_since is None:
            self.unanswered_since = self._clock()
        return CommitFrame(tuple(commits), released) if commits or released else None
