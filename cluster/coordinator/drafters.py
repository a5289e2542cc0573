"""The drafter pool: which replica serves which session, and the newest tree each one sent.

Everything a drafter sends is checked here; nothing it does or fails to do can hold up a round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter

from cluster import metrics
from cluster.coordinator.pool_scores import POOL_NODES, PoolScores
from cluster.coordinator.present import Asked, Present
from cluster.coordinator.replica import DrafterLink, DrafterReplica, DrafterReplicas, Subscription
from cluster.coordinator.session import Session
from cluster.core import Observation, Proposal
from cluster.messages import PoolTree, ProposalFrame, Refusal, WorkerDescription
from cluster.plan.offers import gather, look_at
from cluster.spec.tree import prune
from cluster.spec.tree_check import problem_in_text, problems_of_proposals

log = logging.getLogger(__name__)

# Answers in a row that ask for tokens again, after which a drafter is given up for a while.
_MAX_SHORTAGES = 8


class DrafterPool:
    """Replicas by drafter name.  A session sticks to one replica per name while that one lives."""

    def __init__(self, present: Present, scores: PoolScores) -> None:
        self._present = present
        self._scores = scores
        self._renewed: dict[str, Session] = {}  # those with a tree that their target has not got
        self._num_merges = 0
        self._merging = present.fence.section("pool trees")
        self._num_changes = scores.roster.num_changes  # of the roster, as the sessions follow it
        self.replicas = DrafterReplicas(present)
        self._warned: set[str] = set()  # drafters that were said to take the target's time
        self._committing = present.fence.section("commits")

    def add(
        self, name: str, replica_id: str, description: WorkerDescription, link: DrafterLink
    ) -> DrafterReplica:
        """Take a replica into the pool.  Of several with different models the last one counts."""
        sessions = self._present.sessions.values()
        if self._scores.meet(name, description.model_hash):
            for session in sessions:
                session.text.forget(name)
        replica = self.replicas.add(name, replica_id, description, link)
        for session in sessions:
            if session.target is not None and name in session.text.names:
                self.commit(session)
        return replica

    def remove(self, replica: DrafterReplica, *, failed: bool) -> None:
        """Take a replica out; its sessions go to others."""
        if not self.replicas.drop(replica, failed=failed):
            return
        if not any(each.name == replica.name for each in self.replicas):
            self._scores.roster.left(replica.name)
        self._move(replica)

    def tick(self) -> None:
        """Free sessions of replicas that have stopped answering, and follow the roster."""
        for replica in self.replicas:
            if not replica.subscriptions or not replica.is_stalled:
                continue
            other = self.replicas.pick(replica.name, besides=replica)
            if other is not None and not other.is_stalled:
                self.replicas.count_fault(replica.name, "stalled")
                self._move(replica)
        roster = self._scores.roster
        roster.note_faults(self.replicas.faults())
        if self._num_changes != roster.num_changes:
            self._num_changes = roster.num_changes
            for session in self._present.sessions.values():
                roster.drop_trees(session.text)

    def commit(self, session: Session) -> None:
        """Let the pool drafters of `session` know its tokens.  Returns at once.

        Drafters read a prompt while the target does, but not on its own devices: there they read it
        after the first token, which would come later by the time they take.
        """
        with self._committing:
            self._commit(session)

    def _commit(self, session: Session) -> None:
        target, text = session.target, session.text
        inside = target.residents if target is not None else ()
        num_texts = len(target.sessions) if target is not None else 1
        for name in self._scores.roster.asked(text):
            if name in inside:
                continue
            own: Subscription | None = session.subscriptions.get(name)
            own = own or self._subscribe(session, name)
            if own is None:
                continue
            replica = own.replica
            is_shared = replica.shares_devices(target)
            if not session.has_answered and is_shared:
                continue
            lag = self._scores.commit_lag(text, name, num_texts, is_shared=is_shared)
            num_unsent = len(session.tokens) - own.sent_len
            if own.generation == session.generation and num_unsent < lag:
                continue
            is_model = bool(replica.description.model_hash)
            own.max_nodes = self._scores.ask(text, num_texts, is_model=is_model)
            is_hit = text.has_tree_left(name) if session.has_answered else None
            self._present.events.post(
                Asked(name, text.group, session.request.task, own.max_nodes, is_hit)
            )
            replica.mark(own)

    def release(self, session: Session) -> None:
        """The session is over; its drafters free what they hold of it."""
        for own in list(session.subscriptions.values()):
            own.replica.forget(session)

    def num_waiting(self) -> Counter[str]:
        """Count by drafter the texts that run and for which its replicas have no room."""
        full = {replica.name for replica in self.replicas if not replica.has_room()}
        return Counter(
            name
            for session in self._present.sessions.values()
            if session.target is not None
            for name in session.text.names
            if name in full and name not in session.subscriptions
        )

    def receive(self, replica: DrafterReplica, frame: ProposalFrame) -> None:
        """Take in one frame: keep newest trees, send again what is missing, count faults."""
        replica.note_held(frame)
        problems = problems_of_proposals(frame.proposals, self._present.limits.vocab_size)
        kept = [
            self._take_in(replica, *each) for each in zip(frame.proposals, problems, strict=True)
        ]
        if any(kept) and None not in kept:
            replica.breaker.record_success()
        for observation in frame.observations:
            self._observe(replica, observation)
        for refusal in frame.refusals:
            self._refused(replica, refusal)
        if math.isfinite(frame.draft_time_s) and frame.draft_time_s > 0.0:
            self._present.recorder.add(metrics.DRAFT_TIME, frame.draft_time_s, drafter=replica.name)

    def warn_of_shared(self) -> None:
        """Say of drafters that they take the target's time, once of each, where the configuration
        does not say, by `nice`, that they stand back."""
        config, seats = self._present.config, self._present.seats.values()
        for replica in self.replicas:
            name, drafter = replica.name, config.drafters.get(replica.name)
            if drafter is not None and (
                drafter.nice > 0
                or drafter.application  # of one in another application that is not known here
                or not config.computes(name)
            ):
                continue
            if name not in self._warned and any(map(replica.shares_devices, seats)):
                self._warned.add(name)
                log.warning(
                    "drafter shares the target's devices name=%s; give each its own (on a CPU by "
                    "placement.cores), or let it run inside the target (placement: {with: target})",
                    name,
                )

    def _take_in(
        self, replica: DrafterReplica, proposal: Proposal, problem: str | None
    ) -> bool | None:
        """Return whether a tree is of use now; None = it is refused, for a problem."""
        own = None if problem else replica.current(proposal)
        if own is not None:
            problem = problem_in_text(proposal, own.session.tokens)
        if problem is not None:
            self._record_fault(replica, "rubbish", problem)
            return None
        if own is None:
            return False
        if self._scores.keep_newest(own.session.text, replica.name, proposal) is not None:
            if not self._renewed:
                asyncio.get_running_loop().call_soon(self._merge)
            self._renewed[own.session.id] = own.session
        return True

    def _merge(self) -> None:
        """Merge the trees of all texts that got a new one, in one turn of the event loop."""
        sessions = [each for each in self._renewed.values() if each.target is not None]
        self._renewed.clear()
        with self._merging:
            self._send_trees(sessions)

    def _send_trees(self, sessions: list[Session]) -> None:
        texts = [each.text for each in sessions]
        offers = gather(texts, self._scores.acceptance)
        self._num_merges += 1
        look_at(texts, self._num_merges)
        if offers is None:
            return
        bounds = offers.forest.starts.tolist()
        for session, tree, start, stop in zip(
            sessions, offers.forest.split(), bounds, bounds[1:], strict=False
        ):
            if start == stop or session.target is None:
                continue
            kept, survival, places = prune(tree, offers.survival[start:stop], POOL_NODES)
            tokens = session.tokens
            session.target.tell(
                PoolTree(
                    session.id,
                    session.generation,
                    len(tokens),
                    tokens.hash_at(len(tokens)),
                    kept,
                    survival,
                    offers.sources[start:stop][places],
                    tuple(session.text.weights.get(name, 0.0) for name in session.text.names),
                )
            )

    def _move(self, replica: DrafterReplica) -> None:
        """Its sessions go to others."""
        for session in self._detach_all(replica):
            self.commit(session)

    def _subscribe(self, session: Session, name: str) -> Subscription | None:
        now = self._present.clock()
        replica = None if now < session.declined.get(name, now) else self.replicas.pick(name)
        return None if replica is None else replica.subscribe(session)

    def _detach_all(self, replica: DrafterReplica) -> list[Session]:
        sessions = [own.session for own in replica.subscriptions.values()]
        for session in sessions:
            replica.forget(session)
        return sessions

    def _record_fault(self, replica: DrafterReplica, why: str, told: str) -> None:
        if self.replicas.record_fault(replica, why, told):
            self._detach_all(replica)

    def _observe(self, replica: DrafterReplica, observation: Observation) -> None:
        own = replica.current(observation)
        if own is None:
            return
        have_len, expected = observation.have_len, own.expected
        if have_len in expected:
            # It answers this commit; frames before it may have been lost on the way.
            while expected.popleft() != have_len:
                continue
            own.num_shortages = 0
        elif 0 <= have_len < own.sent_len:
            own.num_shortages += 1
            keeps_nothing = have_len == 0 and own.base_len == 0
            if keeps_nothing or own.num_shortages > _MAX_SHORTAGES:
                # It is full, or at its end; sending the text again and again would not help.
                self._decline(own, own.replica.breaker.reset_s)
                return
            own.sent_len = have_len
            expected.clear()
            replica.mark(own)

    def _decline(self, own: Subscription, kept_s: float) -> None:
        own.replica.forget(own.session)
        own.session.declined[own.replica.name] = self._present.clock() + kept_s

    def _refused(self, replica: DrafterReplica, refusal: Refusal) -> None:
        own = replica.current(refusal)
        if own is None:
            return
        ruling, told = replica.breaker.rule(refusal.code), refusal.code
        if ruling.fault == "rubbish":
            # As the codec says of a proposal that it refuses: the drafter goes on with the next.
            told = f"{refusal.code}: {refusal.message}"
        else:
            # What it says itself may quote the prompt.
            self._decline(own, ruling.kept_s)
        if ruling.fault:
            self._record_fault(replica, ruling.fault, told)
