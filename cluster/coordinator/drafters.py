"""The drafter pool: which replica serves which session, and the newest tree each one sent.

Everything a drafter sends is checked here; nothing it does or fails to do can hold up a round.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster.config.schema import Config, CoordinatorConfig
from cluster.coordinator.demand import Demand
from cluster.coordinator.pool_scores import PoolScores
from cluster.coordinator.pool_trees import PoolTrees
from cluster.coordinator.replica import DrafterLink, DrafterReplica, Subscription
from cluster.coordinator.replicas import DrafterReplicas
from cluster.coordinator.session import Seat, Session
from cluster.core import Observation, Proposal
from cluster.messages import ProposalFrame, Refusal, WorkerDescription
from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence
from cluster.spec.tree_check import problem_in_text, problems_of_proposals

log = logging.getLogger(__name__)

# Answers in a row that ask for tokens again, after which a drafter is given up for a while.
_MAX_SHORTAGES = 8


class DrafterPool:
    """Replicas by drafter name.  A session sticks to one replica per name while that one lives."""

    def __init__(
        self,
        config: CoordinatorConfig,
        recorder: Recorder,
        scores: PoolScores,
        fence: Fence,
    ) -> None:
        self._trees = PoolTrees(scores, fence)
        self._num_changes = scores.roster.num_changes  # of the roster, as the sessions follow it
        self._config = config
        self._recorder = recorder
        self._scores = scores
        self.demand = Demand(recorder, scores.acceptance)
        self.replicas = DrafterReplicas(config, recorder)
        self._subscribed: dict[str, Session] = {}  # by id: those that a replica is told of
        self._committing = fence.section("commits")

    def __iter__(self) -> Iterator[DrafterReplica]:
        return iter(self.replicas)

    def add(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: DrafterLink,
    ) -> DrafterReplica:
        """Take a replica into the pool.  Of several with different models the last one counts."""
        if self._scores.meet(name, description.model_hash):
            for session in self._subscribed.values():
                session.forget(name)
        return self.replicas.add(name, replica_id, description, link)

    def remove(self, replica: DrafterReplica, now: float, *, failed: bool) -> list[Session]:
        """Take a replica out.  Returns the sessions that lost it, to be committed elsewhere."""
        if not self.replicas.remove(replica, now, failed=failed):
            return []
        if not any(each.name == replica.name for each in self):
            self._scores.roster.left(replica.name)
        return self._detach_all(replica)

    def tick(self, now: float) -> None:
        """Free sessions of replicas that have stopped answering, and follow the roster."""
        for session in self.move_stalled(now):
            self.commit(session, now)
        roster = self._scores.roster
        roster.note_faults(self.replicas.faults())
        if self._num_changes != roster.num_changes:
            self._num_changes = roster.num_changes
            for session in self._subscribed.values():
                roster.drop_trees(session)

    def commit(self, session: Session, now: float) -> None:
        """Let the pool drafters of `session` know its tokens.  Returns at once.

        Drafters read a prompt while the target does, but not on its own devices: there they read it
        after the first token, which would come later by the time they take.
        """
        with self._committing:
            self._commit(session, now)

    def _commit(self, session: Session, now: float) -> None:
        target, names = session.target, self._scores.roster.asked(session)
        if target is not None and target.residents:
            names = tuple(name for name in names if name not in target.residents)
        num_texts = target.num_sessions if target is not None else 1
        for name in names:
            subscription = session.subscriptions.get(name)
            if subscription is None:
                subscription = self._subscribe(session, name, now)
                if subscription is None:
                    continue
            replica = subscription.replica
            is_shared = share_devices(replica, target)
            if not session.has_answered and is_shared:
                continue
            lag = self._scores.commit_lag(session, name, num_texts, is_shared=is_shared)
            num_unsent = len(session.tokens) - subscription.sent_len
            if subscription.generation == session.generation and num_unsent < lag:
                continue
            is_model = bool(replica.description.model_hash)
            num_nodes = self._scores.ask(session, num_texts, is_model=is_model)
            self.demand.note(session, name, num_nodes)
            replica.mark(session, num_nodes)

    def release(self, session: Session) -> None:
        """The session is over; its drafters free what they hold of it."""
        for subscription in session.subscriptions.values():
            subscription.replica.forget(session.id)
        session.subscriptions.clear()
        self._subscribed.pop(session.id, None)

    def num_waiting(self, sessions: Iterable[Session]) -> Counter[str]:
        """Count by drafter the texts that run and for which its replicas have no room."""
        full = {replica.name for replica in self if not replica.has_room()}
        return Counter(
            name
            for session in sessions
            if session.target is not None
            for name in session.drafters
            if name in full and name not in session.subscriptions
        )

    def receive(
        self,
        replica: DrafterReplica,
        frame: ProposalFrame,
        sessions: Mapping[str, Session],
        now: float,
        vocab_size: int,
    ) -> None:
        """Take in one frame: keep newest trees, send again what is missing, count faults.

        vocab_size: of the targets.
        """
        replica.unanswered_since = None
        problems = problems_of_proposals(frame.proposals, vocab_size)
        self._take_in(replica, frame.proposals, problems, sessions, now)
        for observation in frame.observations:
            self._observe(replica, observation, sessions, now)
        for refusal in frame.refusals:
            self._refused(replica, refusal, sessions, now)
        replica.record(self._recorder, frame)

    def _take_in(
        self,
        replica: DrafterReplica,
        proposals: Sequence[Proposal],
        problems: Sequence[str | None],
        sessions: Mapping[str, Session],
        now: float,
    ) -> None:
        """problems: of each proposal."""
        num_kept = num_refused = 0
        for proposal, fault in zip(proposals, problems, strict=True):
            if fault is not None:
                num_refused += 1
                self._record_fault(replica, "rubbish", now, fault)
                continue
            session = sessions.get(proposal.request_id)
            subscription = self._current(replica, session)
            if session is None or subscription is None:
                continue
            if proposal.generation != session.generation:
                continue
            problem = problem_in_text(proposal, session.tokens)
            if problem is not None:
                num_refused += 1
                self._record_fault(replica, "rubbish", now, problem)
                continue
            num_kept += 1
            if self._scores.keep_newest(session, replica.name, proposal) is not None:
                self._trees.renewed(session)
        if num_kept and not num_refused:
            replica.breaker.record_success()

    def move_stalled(self, now: float) -> list[Session]:
        """Free the sessions of replicas that have stopped answering, where another one is free."""
        moved: list[Session] = []
        for replica in list(self):
            if not replica.sessions or not self.replicas.is_stalled(replica, now):
                continue
            other = self.replicas.pick(replica.name, now, besides=replica)
            if other is not None and not self.replicas.is_stalled(other, now):
                self.replicas.count_fault(replica.name, "stalled")
                moved.extend(self._detach_all(replica))
        return moved

    def _subscribe(self, session: Session, name: str, now: float) -> Subscription | None:
        if now < session.declined.get(name, now):
            return None
        replica = self.replicas.pick(name, now)
        if replica is None:
            return None
        return self.attach(session, replica)

    def attach(self, session: Session, replica: DrafterReplica) -> Subscription:
        """The replica drafts for `session` from now on."""
        subscription = session.subscriptions[replica.name] = Subscription(replica)
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
        session.held.pop(replica.name, None)
        replica.forget(session.id)

    def _record_fault(self, replica: DrafterReplica, why: str, now: float, told: str) -> None:
        if self.replicas.record_fault(replica, why, now, told):
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
        ruling = replica.breaker.rule(refusal.code)
        if ruling.fault == "rubbish":
            # As the codec says of a proposal that it refuses: the drafter goes on with the next.
            told = f"{refusal.code}: {refusal.message}"
            self._record_fault(replica, ruling.fault, now, told)
            return
        self._decline(replica, session, now + ruling.kept_s)
        if ruling.fault:
            # What it says itself may quote the prompt.
            self._record_fault(replica, ruling.fault, now, refusal.code)


def share_devices(replica: DrafterReplica, seat: Seat | None) -> bool:
    """True if its computing slows the target down, as far as their devices are known."""
    return seat is not None and not replica.devices.isdisjoint(seat.devices)


class SharedDevices:
    """Says of drafters that they take the target's time, once of each."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, config: Config, pool: DrafterPool, seats: Sequence[Seat]) -> None:
        """Warn of those that do, and whose configuration does not say, by `nice`, that they stand
        back."""
        for replica in pool:
            drafter = config.drafters.get(replica.name)
            if drafter is not None and (drafter.nice > 0 or drafter.application):
                continue  # of one in another application that is not known here
            if drafter is not None and not config.computes(replica.name):
                continue
            is_shared = any(share_devices(replica, seat) for seat in seats)
            if is_shared and replica.name not in self._warned:
                self._warned.add(replica.name)
                log.warning(
                    "drafter shares the target's devices name=%s; give each its own (on a CPU by "
                    "placement.cores), or let it run inside the target (placement: {with: target})",
                    replica.name,
                )
