"""The drafter pool: which replica serves which session, and the newest tree each one sent.

Everything a drafter sends is checked here; nothing it does or fails to do can hold up a round.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator.arrivals import ArrivalModel
from cluster.coordinator.demand import DraftDemand, share_devices, used_by_drafter
from cluster.coordinator.fence import Fence
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.proposals import keep_newest, note_loss, problem_of
from cluster.coordinator.replica import DrafterReplica, Subscription
from cluster.coordinator.replicas import DrafterReplicas
from cluster.coordinator.session import Session, Status
from cluster.core import Observation, Proposal, Verdict
from cluster.errors import CapacityError, ProtocolError, RequestError, error_from_code
from cluster.messages import CommitFrame, ProposalFrame, Refusal, WorkerDescription
from cluster.metrics import Recorder
from cluster.rpc.link import Link
from cluster.spec.tree_check import problems_of_proposals

log = logging.getLogger(__name__)

# Answers in a row that ask for tokens again, after which a drafter is given up for a while.
_MAX_SHORTAGES = 8


class DrafterPool:
    """Replicas by drafter name.  A session sticks to one replica per name while that one lives."""

    def __init__(
        self, config: CoordinatorConfig, recorder: Recorder, arrivals: ArrivalModel, fence: Fence
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._arrivals = arrivals
        self._demand = DraftDemand(config)
        self._replicas = DrafterReplicas(config, recorder)
        self._subscribed: dict[str, Session] = {}  # by id: those that a replica is told of
        self._committing = fence.section("commits")
        self._expecting = fence.section("expectations")

    def __iter__(self) -> Iterator[DrafterReplica]:
        return iter(self._replicas)

    def get(self, name: str, replica_id: str) -> DrafterReplica | None:
        return self._replicas.get(name, replica_id)

    def add(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: Link[CommitFrame, ProposalFrame],
    ) -> DrafterReplica:
        """Take a replica into the pool."""
        self._demand.forget(name)
        return self._replicas.add(name, replica_id, description, link)

    def remove(self, replica: DrafterReplica, now: float, *, failed: bool) -> list[Session]:
        """Take a replica out.  Returns the sessions that lost it, to be committed elsewhere."""
        if not self._replicas.remove(replica, now, failed=failed):
            return []
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
        with self._committing:
            self._commit(session, now, in_flight, verdict)

    def _commit(
        self,
        session: Session,
        now: float,
        in_flight: InFlight | None,
        verdict: Verdict | None,
    ) -> None:
        names, apart = session.drafters, self._replicas.apart(session)
        shared = tuple(name for name in names if name not in apart) if apart else names
        if self._demand.skips(session, shared):
            if not apart:
                return
            names = apart
        used = None
        if in_flight and verdict and self._demand.learns:
            used = used_by_drafter(in_flight, verdict.path)
        for name in names:
            if (
                session.num_silent_commits
                and name not in apart
                and self._demand.passes_over(session, name, is_model=self._replicas.is_model(name))
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
                self._arrivals.committed(session, name, subscription, now)
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

    @staticmethod
    def drop_trees(batch: Iterable[Session]) -> None:
        """Forget what drafters have proposed for these."""
        for session in batch:
            for subscription in session.subscriptions.values():
                subscription.held = None

    def record_demand(self) -> None:
        """Export what drafters were asked for since the last call."""
        self._demand.record(self._recorder)

    def receive(
        self,
        replica: DrafterReplica,
        frame: ProposalFrame,
        sessions: Mapping[str, Session],
        now: float,
        vocab_size: int,
    ) -> list[Session]:
        """Take in one frame: keep newest trees, send again what is missing, count faults.

        vocab_size: of the targets.  Returns the sessions with a new tree for what is committed at
        present, and those for which no other is to come.
        """
        replica.unanswered_since = None
        problems = problems_of_proposals(frame.proposals, vocab_size)
        renewed = self._take_in(replica, frame.proposals, problems, sessions, now)
        for observation in frame.observations:
            self._observe(replica, observation, sessions, now)
        for completion in frame.completions:
            subscription = self._current(replica, sessions.get(completion.request_id))
            if subscription is None:
                continue
            session = sessions[completion.request_id]
            is_current = completion.generation == session.generation
            if is_current and self._arrivals.completed(session, subscription, completion):
                renewed.append(session)
        for refusal in frame.refusals:
            self._refused(replica, refusal, sessions, now)
        replica.record(self._recorder, frame)
        return renewed

    def _take_in(
        self,
        replica: DrafterReplica,
        proposals: Sequence[Proposal],
        problems: Sequence[str | None],
        sessions: Mapping[str, Session],
        now: float,
    ) -> list[Session]:
        """problems: of each proposal.  Returns the sessions with a tree of use at present."""
        renewed: list[Session] = []
        num_kept = num_refused = 0
        for proposal, fault in zip(proposals, problems, strict=True):
            if fault is not None:
                num_refused += 1
                self._record_rubbish(replica, fault, now)
                continue
            session = sessions.get(proposal.request_id)
            subscription = self._current(replica, session)
            if session is None or subscription is None:
                continue
            if proposal.generation != session.generation:
                continue
            problem = problem_of(proposal, session)
            if problem is not None:
                num_refused += 1
                self._record_rubbish(replica, problem, now)
                continue
            num_kept += 1
            keep_newest(subscription, proposal)
            with self._expecting:
                if len(proposal.tree):
                    self._demand.offered(session, replica.name)
                if self._arrivals.arrived(subscription, proposal, now):
                    renewed.append(session)
        if num_kept and not num_refused:
            replica.breaker.record_success()
        return renewed

    def _record_rubbish(self, replica: DrafterReplica, problem: str, now: float) -> None:
        log.warning("drafter sent rubbish name=%s id=%s: %s", replica.name, replica.id, problem)
        self._record_fault(replica, "rubbish", now)

    def move_stalled(self, now: float) -> list[Session]:
        """Free the sessions of replicas that have stopped answering, where another one is free."""
        moved: list[Session] = []
        for replica in list(self):
            if not replica.sessions or not self._replicas.is_stalled(replica, now):
                continue
            other = self._replicas.pick(replica.name, now, besides=replica)
            if other is not None and not self._replicas.is_stalled(other, now):
                self._recorder.add(metrics.DRAFTER_FAULTS, drafter=replica.name, why="stalled")
                moved.extend(self._detach_all(replica))
        return moved

    def status(self, now: float) -> list[dict[str, object]]:
        return self._replicas.status(now)

    def _subscribe(self, session: Session, name: str, now: float) -> Subscription | None:
        if now < session.declined.get(name, now):
            return None
        replica = self._replicas.pick(name, now)
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
        if self._replicas.record_fault(replica, why, now):
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
        if isinstance(error, ProtocolError):
            # As the codec says of a proposal that it refuses: the drafter goes on with the next.
            self._record_rubbish(replica, error.message, now)
            return
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
