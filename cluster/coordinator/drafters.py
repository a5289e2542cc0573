"""The drafter pool: which replica serves which session, and the newest tree each one sent.

Everything a drafter sends is checked here; nothing it does or fails to do can hold up a round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator.breaker import BreakerBook
from cluster.coordinator.demand import DraftDemand, share_devices, used_by_drafter
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.promises import PromiseBook
from cluster.coordinator.proposals import (
    are_sound,
    keep_newest,
    note_loss,
    problem_of,
    problem_of_tree,
)
from cluster.coordinator.replica import DrafterReplica, Subscription
from cluster.coordinator.session import Session, Status
from cluster.core import Observation, Verdict
from cluster.errors import CapacityError, RequestError, error_from_code
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.metrics import Recorder
from cluster.rpc.link import Link

log = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4
# Answers in a row that ask for tokens again, after which a drafter is given up for a while.
_MAX_SHORTAGES = 8


class DrafterPool:
    """Replicas by drafter name.  A session sticks to one replica per name while that one lives."""

    def __init__(
        self, config: CoordinatorConfig, recorder: Recorder, promises: PromiseBook
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._promises = promises
        self._demand = DraftDemand(config)
        self._replicas: dict[str, dict[str, DrafterReplica]] = {}
        self._subscribed: dict[str, Session] = {}  # by id: those that a replica is told of
        self._breakers = BreakerBook(config.breaker_failures, config.breaker_reset_s)
        # Half a frame at most, which leaves room for everything that is not tokens.
        self._max_frame_tokens = config.max_frame_bytes // (2 * _BYTES_PER_TOKEN)

    def __iter__(self) -> Iterator[DrafterReplica]:
        for replicas in self._replicas.values():
            yield from replicas.values()

    def get(self, name: str, replica_id: str) -> DrafterReplica | None:
        return self._replicas.get(name, {}).get(replica_id)

    def add(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: Link[CommitFrame, ProposalFrame],
    ) -> DrafterReplica:
        """Take a replica into the pool.  A breaker that its former life opened stays open."""
        breaker = self._breakers.of(name, replica_id)
        replica = DrafterReplica(
            name, replica_id, description, link, breaker, self._max_frame_tokens
        )
        self._replicas.setdefault(name, {})[replica.id] = replica
        self._demand.forget(name)
        self._recorder.set(metrics.DRAFTER_UP, len(self._replicas[name]), drafter=name)
        return replica

    def remove(self, replica: DrafterReplica, now: float, *, failed: bool) -> list[Session]:
        """Take a replica out.  Returns the sessions that lost it, to be committed elsewhere."""
        replicas = self._replicas.get(replica.name, {})
        if replicas.get(replica.id) is not replica:
            return []
        del replicas[replica.id]
        self._recorder.set(metrics.DRAFTER_UP, len(replicas), drafter=replica.name)
        replica.forget_gauges(self._recorder)
        if failed:
            self._record_fault(replica, "link", now)
        else:
            self._breakers.left(replica.name, replica.id)
        self._breakers.forget({(other.name, other.id) for other in self}, now)
        return self._detach_all(replica)

    def commit(
        self,
        session: Session,
        now: float,
        in_flight: InFlight | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        """Let the drafters of `session` know its tokens, as far as they are of use to it.

        in_flight, verdict: of the step that led to them, if there was one.  Returns at once.
        Drafters read a prompt while the target does, but not on its own devices: there they read it
        after the first token, which would come later by the time they take.
        """
        if self._demand.skips(session):
            return
        used = None
        if in_flight and verdict and self._demand.learns:
            used = used_by_drafter(in_flight, verdict.path)
        for name in session.drafters:
            if session.num_silent_commits and self._demand.passes_over(
                session, name, is_model=self._is_model(name)
            ):
                continue
            subscription = session.subscriptions.get(name)
            if subscription is None:
                subscription = self._subscribe(session, name, now)
                if subscription is None:
                    continue
            replica = subscription.replica
            if session.status is Status.PREFILL and share_devices(replica, session.target):
                continue
            demand = self._demand.of(session, replica, used)
            if demand.max_nodes:
                self._promises.committed(session, name, subscription, now)
            else:
                subscription.growth = None  # nothing is to be expected of it
            if demand.is_told:
                replica.mark(session, demand.max_nodes)

    def release(self, session: Session) -> None:
        """The session is over; its drafters free what they hold of it."""
        for subscription in session.subscriptions.values():
            subscription.replica.forget(session.id)
        session.subscriptions.clear()
        self._subscribed.pop(session.id, None)
        self._demand.release(session)

    def record_demand(self) -> None:
        """Export what drafters were asked for since the last call."""
        self._demand.record(self._recorder)

    def receive(
        self,
        replica: DrafterReplica,
        frame: ProposalFrame,
        sessions: Mapping[str, Session],
        now: float,
    ) -> list[Session]:
        """Take in one frame: keep newest trees, send again what is missing, count faults.

        Returns the sessions with a new tree for what is committed at present, and those for which
        no other is to come.
        """
        replica.unanswered_since = None
        renewed: list[Session] = []
        for proposal in frame.proposals:
            subscription = self._current(replica, sessions.get(proposal.request_id))
            if subscription is None:
                continue
            session = sessions[proposal.request_id]
            if proposal.generation != session.generation:
                continue
            problem = problem_of(proposal, session)
            if problem is None:
                keep_newest(subscription, proposal)
                if len(proposal.tree):
                    self._demand.offered(session, replica.name)
                if self._promises.arrived(subscription, proposal, now):
                    renewed.append(session)
            else:
                self._record_rubbish(replica, problem, now)
        for observation in frame.observations:
            self._observe(replica, observation, sessions, now)
        for completion in frame.completions:
            subscription = self._current(replica, sessions.get(completion.request_id))
            if subscription is None:
                continue
            session = sessions[completion.request_id]
            is_current = completion.generation == session.generation
            if is_current and self._promises.completed(session, subscription, completion):
                renewed.append(session)
        for refusal in frame.refusals:
            self._refused(replica, refusal, sessions, now)
        replica.record(self._recorder, frame)
        return renewed

    def check_trees(self, batch: Iterable[Session], vocab_size: int, now: float) -> None:
        """Look at the trees that a batch is about to use, each once; unsound ones are dropped."""
        unchecked = [
            (subscription, subscription.held)
            for session in batch
            for subscription in session.subscriptions.values()
            if subscription.held is not None and not subscription.held.checked
        ]
        if are_sound([held for _, held in unchecked], vocab_size):
            for _, held in unchecked:
                held.checked = True
            for replica in {subscription.replica for subscription, _ in unchecked}:
                replica.breaker.record_success()
            return
        for subscription, held in unchecked:
            replica = subscription.replica
            problem = problem_of_tree(held.tree, held.survival, vocab_size)
            if problem is None:
                held.checked = True
                replica.breaker.record_success()
            else:
                subscription.held = None
                self._record_rubbish(replica, problem, now)

    def _record_rubbish(self, replica: DrafterReplica, problem: str, now: float) -> None:
        log.warning("drafter sent rubbish name=%s id=%s: %s", replica.name, replica.id, problem)
        self._record_fault(replica, "rubbish", now)

    def move_stalled(self, now: float) -> list[Session]:
        """Free the sessions of replicas that have stopped answering, where another one is free."""
        moved: list[Session] = []
        for replica in list(self):
            if not replica.sessions or not replica.is_stalled(now, self._config.breaker_reset_s):
                continue
            other = self._pick(replica.name, now, besides=replica)
            if other is not None and not other.is_stalled(now, self._config.breaker_reset_s):
                self._recorder.add(metrics.DRAFTER_FAULTS, drafter=replica.name, why="stalled")
                moved.extend(self._detach_all(replica))
        return moved

    def status(self, now: float) -> list[dict[str, object]]:
        return [
            {
                "name": replica.name,
                "id": replica.id,
                "sessions": len(replica.sessions),
                "breaker": replica.breaker.state(now),
            }
            for replica in self
        ]

    def _pick(
        self, name: str, now: float, besides: DrafterReplica | None = None
    ) -> DrafterReplica | None:
        """The least loaded replica that may be used; one that owes an answer only at need."""
        usable = [
            replica
            for replica in self._replicas.get(name, {}).values()
            if replica is not besides and replica.breaker.allows(now) and replica.has_room()
        ]
        patience_s = self._config.breaker_reset_s
        return min(
            usable,
            key=lambda replica: (replica.is_stalled(now, patience_s), len(replica.sessions)),
            default=None,
        )

    def _is_model(self, name: str) -> bool:
        replica = next(iter(self._replicas.get(name, {}).values()), None)
        return replica is not None and bool(replica.description.model_hash)

    def _subscribe(self, session: Session, name: str, now: float) -> Subscription | None:
        if now < session.declined.get(name, now):
            return None
        replica = self._pick(name, now)
        if replica is None:
            return None
        subscription = session.subscriptions[name] = Subscription(replica)
        replica.sessions[session.id] = session
        self._subscribed[session.id] = session
        return subscription

    @staticmethod
    def _current(replica: DrafterReplica, session: Session | None) -> Subscription | None:
        """The session's subscription, when it is with this very replica."""
        if session is None:
            return None
        subscription = session.subscriptions.get(replica.name)
        return subscription if subscription and subscription.replica is replica else None

    def _detach_all(self, replica: DrafterReplica) -> list[Session]:
        sessions = [self._subscribed[session_id] for session_id in replica.sessions]
        for session in sessions:
            self._detach(replica, session)
        return sessions

    @staticmethod
    def _detach(replica: DrafterReplica, session: Session) -> None:
        session.subscriptions.pop(replica.name, None)
        replica.forget(session.id)

    def _record_fault(self, replica: DrafterReplica, why: str, now: float) -> None:
        self._recorder.add(metrics.DRAFTER_FAULTS, drafter=replica.name, why=why)
        if replica.breaker.record_failure(now):
            log.warning("drafter left alone name=%s id=%s why=%s", replica.name, replica.id, why)
            self._detach_all(replica)

    def _observe(
        self,
        replica: DrafterReplica,
        observation: Observation,
        sessions: Mapping[str, Session],
        now: float,
    ) -> None:
        session = sessions.get(observation.request_id)
        subscription = self._current(replica, session)
        if session is None or subscription is None:
            return
        if observation.generation != session.generation:
            return
        note_loss(subscription, observation)
        have_len, expected = observation.have_len, subscription.expected
        if have_len in expected:
            # It answers this commit; frames before it may have been lost on the way.
            while expected.popleft() != have_len:
                continue
            subscription.num_shortages = 0
        elif 0 <= have_len < subscription.sent_len:
            subscription.num_shortages += 1
            keeps_nothing = have_len == 0 and subscription.base_len == 0
            if keeps_nothing or subscription.num_shortages > _MAX_SHORTAGES:
                # It is full, or at its end; sending the text again and again would not help.
                self._decline(replica, session, now + self._config.breaker_reset_s)
                return
            subscription.sent_len = have_len
            expected.clear()
            replica.mark(session)

    def _decline(self, replica: DrafterReplica, session: Session, until: float) -> None:
        self._detach(replica, session)
        session.declined[replica.name] = until

    def _refused(
        self,
        replica: DrafterReplica,
        refusal: Refusal,
        sessions: Mapping[str, Session],
        now: float,
    ) -> None:
        session = sessions.get(refusal.request_id)
        if self._current(replica, session) is None or session is None:
            return
        if refusal.generation != session.generation:
            return
        error = error_from_code(refusal.code, refusal.message)
        if isinstance(error, RequestError):
            # It is this request that it cannot serve (say, too long); nothing is wrong with it.
            self._decline(replica, session, math.inf)
            return
        # Else its whole text would be sent again after every verdict.
        self._decline(replica, session, now + self._config.breaker_reset_s)
        if isinstance(error, CapacityError):
            return  # nor is anything wrong with one that is full
        log.warning("drafter refused name=%s id=%s code=%s", replica.name, replica.id, refusal.code)
        self._record_fault(replica, "refused", now)
