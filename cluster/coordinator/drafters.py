"""The drafter pool: which replica serves which session, and the newest tree each one sent.

Everything a drafter sends is checked here; nothing it does or fails to do can hold up a round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from cluster import metrics
from cluster.coordinator.present import Answered, Asked, Present
from cluster.coordinator.replica import POOL_NODES, DrafterLink, DrafterReplica, Subscription
from cluster.coordinator.session import MAX_LOST_IN_A_ROW, Session
from cluster.core import Observation, Proposal
from cluster.draft.breaker import CircuitBreaker
from cluster.logs import OnceAMinute
from cluster.plan.fence import Fence
from cluster.plan.in_flight import best_of, gather, look_at
from cluster.plan.roster import DraftScores, Roster
from cluster.rpc.messages import PoolTree, ProposalFrame, Refusal, WorkerDescription
from cluster.spec.tree_check import problem_in_text, problems_of_proposals

log = logging.getLogger(__name__)

# The states of a breaker in which its drafter is asked for nothing.
LEFT_ALONE = ("open", "resting")
# Breakers that are kept for a next life: under new ids each start leaves one behind.
_MAX_BREAKERS = 256


class DrafterPool(list[DrafterReplica]):
    """All replicas.  A session sticks to one per drafter while that one lives.

    seen: names of drafters that were here at some time.  faults: their numbers, by the drafter's
    name and by reason.  scores: of their trees, which only the coordinator sees.  roster: of who
    serves.
    """

    def __init__(self, present: Present) -> None:
        super().__init__()
        self._present = present
        self.roster = Roster(present.config, present.config.pool)
        self.scores = DraftScores(self.roster)
        self._renewed: dict[str, Session] = {}  # those with a tree that their target has not got
        self._num_merges = 0
        self._merging = Fence(present.recorder, "pool trees")
        self.seen: set[str] = set()
        self.faults: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._said = OnceAMinute()
        # By drafter, replica and model; one that a replica's former life opened stays open.
        self.breakers: dict[tuple[str, str, str], CircuitBreaker] = {}
        self._warned: set[str] = set()  # drafters that were said to take the target's time
        self._committing = Fence(present.recorder, "commits")

    def add(
        self, name: str, replica_id: str, description: WorkerDescription, link: DrafterLink
    ) -> DrafterReplica:
        """Take a replica into the pool, with the breaker of its former life with the same model.
        Of several with different models the last one counts."""
        sessions = self._present.sessions.values()
        if self.scores.meet(name, description.model_hash):
            for session in sessions:
                session.text.forget(name)
        config = self._present.config.coordinator
        breaker = self.breakers.setdefault(
            (name, replica_id, description.model_hash),
            CircuitBreaker(config.breaker_failures, config.breaker_reset_s),
        )
        if len(self.breakers) > _MAX_BREAKERS:
            del self.breakers[next(iter(self.breakers))]
        most, clock = config.max_frame_tokens, self._present.clock
        replica = DrafterReplica(name, replica_id, description, link, breaker, most, clock)
        self.append(replica)
        self.seen.add(name)
        self._follow()
        for session in sessions:
            if name in session.text.names:
                self.commit(session)
        return replica

    def leave(self, replica: DrafterReplica, *, failed: bool) -> None:
        """Take a replica out, if it is there; its sessions go to others."""
        if replica not in self:
            return
        self.remove(replica)
        if failed:
            self._count_failure(replica, "link")
        if not any(each.name == replica.name for each in self):
            self.roster.left(replica.name)
            self._follow()
        self._move(replica)

    def tick(self) -> None:
        """Free sessions of replicas that have stopped answering, and follow the roster."""
        for replica in self:
            if not replica.subscriptions or not replica.is_stalled:
                continue
            other = self.pick(replica.name)
            if other is not None and not other.is_stalled:
                self._count_fault(replica.name, "stalled")
                self._move(replica)
        self.roster.note_faults(self.faults)
        self._follow()

    def _follow(self) -> None:
        self.roster.follow(each.text for each in self._present.sessions.values())

    def commit(self, session: Session) -> None:
        """Let the pool drafters of `session` know its tokens.  Returns at once.

        Drafters read a prompt while the target does, but not on its own devices: there they read it
        after the first token, which would come later by the time they take.
        """
        target, text = self._present.seats.get(session.target_id), session.text
        now = self._present.clock()
        if target is None:  # it is told of once the session has a place
            return
        config, num_texts = self._present.config.coordinator, len(target.sessions)
        with self._committing:
            for name in text.names:
                if name in target.description.residents or not text.may_ask(name):
                    continue
                own: Subscription | None = session.subscriptions.get(name)
                if own is None:
                    chosen = None if now < session.declined.get(name, now) else self.pick(name)
                    if chosen is None:
                        continue
                    own = chosen.subscribe(session)
                replica = own.replica
                is_shared = replica.shares_devices(target)
                if not session.has_answered and is_shared:
                    continue
                lag = own.commit_lag(config, num_texts, is_shared=is_shared)
                num_unsent = len(session.tokens) - own.sent_len
                if own.generation == session.generation and num_unsent < lag:
                    continue
                own.max_nodes = own.nodes_to_ask(config, num_texts)
                is_hit = text.has_tree_left(name) if session.has_answered else None
                asked = Asked(name, text.group, session.request.task, own.max_nodes, is_hit)
                self._present.post(asked)
                replica.mark(own)

    def hear(self, answers: Sequence[Answered]) -> None:
        """Score the trees of texts that go on, or are over."""
        for ends in (False, True):
            texts = [each.session.text for each in answers if each.session.is_over is ends]
            self.scores.score(texts, ends=ends)

    def release(self, session: Session) -> None:
        """The session is over; its drafters free what they hold of it."""
        for own in list(session.subscriptions.values()):
            own.replica.forget(session)

    def num_waiting(self) -> Counter[str]:
        """Count by drafter the texts that run and for which its replicas have no room."""
        full = {replica.name for replica in self if not replica.has_room()}
        return Counter(
            name
            for session in self._present.sessions.values()
            if session.target_id
            for name in session.text.names
            if name in full and name not in session.subscriptions
        )

    def states(self) -> list[dict[str, Any]]:
        """The replicas, and the residents of each target, as plain pictures of the moment."""
        return [
            *(replica.status() for replica in self),
            *(one for seat in self._present.seats.values() for one in seat.resident_states()),
        ]

    def all_faults(self) -> dict[str, Counter[str]]:
        """The faults of the replicas, and of the residents of each target, by name and reason."""
        inside = [seat.state.get("faults", {}) for seat in self._present.seats.values()]
        found = defaultdict[str, Counter[str]](Counter)
        for faults in (self.faults, *inside):
            for name, own in faults.items():
                found[name].update(own)
        return found

    def usable(self) -> set[str]:
        """Names of the drafters of which a replica may be used at present, or one in a target."""
        return {each["name"] for each in self.states() if each["breaker"] not in LEFT_ALONE}

    def pick(self, name: str) -> DrafterReplica | None:
        """The least loaded replica that may be used; one that owes an answer only at need."""
        now = self._present.clock()
        usable = [
            each
            for each in self
            if each.name == name and each.breaker.allows(now) and each.has_room()
        ]
        return min(usable, key=lambda each: (each.is_stalled, each.num_held), default=None)

    def receive(self, replica: DrafterReplica, frame: ProposalFrame) -> None:
        """Take in one frame: keep newest trees, send again what is missing, count faults."""
        replica.note_held(frame)
        problems = problems_of_proposals(frame.proposals, self._present.served.vocab_size)
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
        for replica in self:
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
            self._count_failure(replica, "rubbish", problem)
            return None
        if own is None:
            return False
        if self.scores.keep_newest(own.session.text, replica.name, proposal) is not None:
            if not self._renewed:
                asyncio.get_running_loop().call_soon(self._merge)
            self._renewed[own.session.id] = own.session
        return True

    def _merge(self) -> None:
        """Merge the trees of all texts that got a new one, in one turn of the event loop."""
        sessions = [each for each in self._renewed.values() if each.target_id]
        self._renewed.clear()
        texts = [each.text for each in sessions]
        with self._merging:
            offers = gather(texts, self.scores.acceptance)
            self._num_merges += 1
            look_at(texts, self._num_merges)
            if offers is None:
                return
            found = best_of(offers, [POOL_NODES] * len(texts))
            for session, best in zip(sessions, found, strict=True):
                if len(best.tree) == 0:
                    continue
                tokens = session.tokens
                self._present.seats[session.target_id].tell(
                    PoolTree(
                        session.id,
                        session.generation,
                        len(tokens),
                        tokens.hash_at(len(tokens)),
                        best.tree,
                        best.survival,
                        best.sources,
                        tuple(session.text.weights.get(name, 0.0) for name in session.text.names),
                    )
                )

    def _move(self, replica: DrafterReplica) -> None:
        """Its sessions go to others."""
        sessions = [own.session for own in replica.subscriptions.values()]
        for session in sessions:
            replica.forget(session)
        for session in sessions:
            self.commit(session)

    def _count_fault(self, name: str, why: str) -> None:
        """Count a fault that says nothing of what comes next."""
        self._present.recorder.add(metrics.DRAFTER_FAULTS, drafter=name, why=why)
        self.faults[name][why] += 1

    def _count_failure(self, replica: DrafterReplica, why: str, told: str = "") -> None:
        """Count a fault, and leave the replica alone for a while where it has had too many.

        told: what the log is to say of it."""
        now = self._present.clock()
        self._count_fault(replica.name, why)
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
        if is_open:
            self._move(replica)

    def _observe(self, replica: DrafterReplica, observation: Observation) -> None:
        own = replica.current(observation)
        if own is None:
            return
        have_len = observation.have_len
        if own.known_len < have_len <= own.sent_len:
            own.known_len, own.num_shortages = have_len, 0
        elif 0 <= have_len < own.sent_len:
            own.num_shortages += 1
            keeps_nothing = have_len == 0 and own.base_len == 0
            if keeps_nothing or own.num_shortages > MAX_LOST_IN_A_ROW:
                # It is full, or at its end; sending the text again and again would not help.
                self._decline(own, replica.breaker.reset_s)
                return
            own.sent_len = own.known_len = have_len
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
            self._count_failure(replica, ruling.fault, told)
