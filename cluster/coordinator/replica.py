"""Connected drafter replicas: their links, what they must still be told, and their breakers."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster import metrics
from cluster.coordinator.idle import Availability
from cluster.coordinator.present import Present
from cluster.coordinator.session import Seat, Session
from cluster.core import Clock, Commit, Observation, Proposal
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.once_a_minute import OnceAMinute
from cluster.draft.told import told_params
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.rpc.duplex import Outbox
from cluster.rpc.link import Link

log = logging.getLogger(__name__)

DrafterLink = Link[CommitFrame, ProposalFrame]


@dataclass(slots=True, eq=False)
class Subscription:
    """One drafter replica's part of a session: what it was told, and what it answered.

    max_nodes: that it may grow, 0 = nothing.  sent_len: tokens it has been sent.  base_len,
    generation: of the last commit, None before the first.  expected: lengths at the ends of commits
    that it has not answered yet.  num_shortages: answers in a row that asked for tokens again.
    """

    session: Session
    replica: DrafterReplica
    max_nodes: int = 0
    sent_len: int = 0
    base_len: int | None = None
    generation: int | None = None
    num_shortages: int = 0
    expected: deque[int] = field(default_factory=lambda: deque(maxlen=64))

    @property
    def has_all(self) -> bool:
        """True if it was sent all tokens."""
        session = self.session
        return self.sent_len == len(session.tokens) and self.generation == session.generation

    def next_commit(self, max_tokens: int) -> Commit:
        """Return what it was not sent, at most max_tokens of it."""
        session, request, base_len = self.session, self.session.request, self.sent_len
        opens = base_len == 0 or self.generation != session.generation
        self.base_len, self.generation = base_len, session.generation
        self.sent_len = min(len(session.tokens), base_len + max_tokens)
        self.expected.append(self.sent_len)
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


class DrafterReplica(Outbox[CommitFrame]):
    """Sends commits to one replica without ever making a token wait.

    Nothing is queued but the *names* of sessions with news: a frame is built from what each session
    is when it is sent.  A slow replica gets fewer, longer commits, and its
    backlog is bounded by the number of its sessions.

    subscriptions: by the id of the session.  num_requests: that it last said it holds, None = it
    has said nothing; pages: of its KV cache, likewise.  unanswered_since: a frame was sent and
    nothing came back yet.
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
        super().__init__(link)
        self.name = name
        self.id = replica_id
        self.description = description
        self.breaker = breaker
        self.subscriptions: dict[str, Subscription] = {}
        self.num_requests: int | None = None
        self.pages: tuple[int, int] | None = None
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

    def shares_devices(self, seat: Seat | None) -> bool:
        """True if its computing slows the target down, as far as their devices are known."""
        own = self.description.devices
        return seat is not None and not set(own).isdisjoint(seat.description.devices)

    def status(self) -> dict[str, object]:
        """A plain picture of the moment, for status reports."""
        return {
            "name": self.name,
            "id": self.id,
            "sessions": len(self.subscriptions),
            "breaker": self.breaker.state(self._clock()),
            "written_at": self.description.written_at,
        }

    @property
    def is_usable(self) -> bool:
        """False while it is left alone."""
        return self.breaker.allows(self._clock())

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
        while self._news and room > 0:
            name = next(iter(self._news))
            own = self._news[name]
            if not own.has_all:
                commits.append(own.next_commit(room))
                room -= len(commits[-1].token_ids)
            if own.has_all:
                del self._news[name]
        if commits and self.unanswered_since is None:
            self.unanswered_since = self._clock()
        return CommitFrame(tuple(commits), released) if commits or released else None


class DrafterReplicas(list[DrafterReplica]):
    """All replicas.  seen: names of drafters that were here at some time."""

    def __init__(self, present: Present) -> None:
        super().__init__()
        self._present = present
        self.seen: set[str] = set()
        self._faults: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._said = OnceAMinute()
        # By drafter, replica and model; one that a replica's former life opened stays open.
        self.breakers: dict[tuple[str, str, str], CircuitBreaker] = {}

    def add(
        self, name: str, replica_id: str, description: WorkerDescription, link: DrafterLink
    ) -> DrafterReplica:
        """Take a replica in, with the breaker of its former life with the same model."""
        config = self._present.config.coordinator
        breaker = self.breakers.setdefault(
            (name, replica_id, description.model_hash),
            CircuitBreaker(config.breaker_failures, config.breaker_reset_s),
        )
        replica = DrafterReplica(
            name,
            replica_id,
            description,
            link,
            breaker,
            config.max_frame_tokens,
            self._present.clock,
        )
        self.append(replica)
        self.seen.add(name)
        return replica

    def drop(self, replica: DrafterReplica, *, failed: bool) -> bool:
        """False when it was not there any more."""
        if replica not in self:
            return False
        self.remove(replica)
        if failed:
            self.record_fault(replica, "link")
        # Under new ids each start would leave a breaker behind.
        now, live = self._present.clock(), [each.breaker for each in self]
        for key, breaker in list(self.breakers.items()):
            if breaker not in live and breaker.is_history(now):
                del self.breakers[key]
        return True

    def count_fault(self, name: str, why: str) -> None:
        """Count a fault that says nothing of what comes next."""
        self._present.recorder.add(metrics.DRAFTER_FAULTS, drafter=name, why=why)
        self._faults[name][why] += 1

    def record_fault(self, replica: DrafterReplica, why: str, told: str = "") -> bool:
        """Count a fault.  True when the replica is to be left alone from now on.

        told: what the log is to say of it."""
        now = self._present.clock()
        self.count_fault(replica.name, why)
        is_open = replica.breaker.record_failure(why, now)
        key = (replica.name, replica.id, why, is_open)
        if (told or is_open) and (count := self._said.is_due(key, now)):
            log.warning(
                "drafter at fault name=%s id=%s why=%s times=%d%s%s",
                replica.name,
                replica.id,
                why,
                count,
                ", left alone for a while" if is_open else "",
                told and f": {told}",
            )
        return is_open

    def faults(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by the drafter's name and by reason."""
        return {name: dict(counts) for name, counts in self._faults.items()}

    def usable(self) -> set[str]:
        """Names of the drafters of which a replica may be used at present."""
        return {each.name for each in self if each.is_usable}

    def pick(self, name: str, besides: DrafterReplica | None = None) -> DrafterReplica | None:
        """The least loaded replica that may be used; one that owes an answer only at need."""
        usable = [
            each
            for each in self
            if each.name == name and each is not besides and each.is_usable and each.has_room()
        ]
        return min(usable, key=lambda each: (each.is_stalled, each.num_held), default=None)

    def availability(self, names: Sequence[str], uptime_s: float) -> Availability:
        """Count the drafters of `names` that could serve a request now."""
        usable = self.usable()
        for seat in self._present.seats.values():
            usable |= {*seat.residents}.difference(seat.left_alone())
        return Availability(
            num_configured=len(names),
            num_usable=len(usable.intersection(names)),
            num_refused=len(self._present.refused.keys() & set(names)),
            num_seen=len(self.seen.intersection(names)),
            uptime_s=uptime_s,
        )
