"""Which draft nodes each sequence of a batch takes along: re-root, merge, and choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.config import CoordinatorConfig
from cluster.coordinator.promises import PromiseBook
from cluster.coordinator.session import Claim, HeldTree, InFlight, Limits, Session, Subscription
from cluster.core import EMPTY_FLOATS, EMPTY_TOKENS, FloatArray, TokenArray, TokenTree, Verdict
from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, SequenceDraft, Share
from cluster.spec.guard import DeficitGuard
from cluster.spec.promises import WAITS_S
from cluster.spec.survival import Calibrator
from cluster.spec.tree import depths, merge, monotone, prune, reroot, subtree

_MAX_CALIBRATORS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """All that the drafters of one session offer at present, as one tree.

    survival: float32[n], not increasing along a path.  sources: uint64[n], bit i = claims[i].
    """

    tree: TokenTree
    survival: FloatArray
    sources: npt.NDArray[np.uint64]
    claims: tuple[Claim, ...]

    def keep(self, kept: npt.NDArray[np.int32]) -> Candidate:
        """The part of nodes `kept`, ascending and each with its parent."""
        if len(kept) == len(self.tree):
            return self
        return Candidate(
            subtree(self.tree, kept), self.survival[kept], self.sources[kept], self.claims
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """When a batch is planned, how long it may wait for drafts, and how long it has."""

    now: float
    max_wait_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do next: verify `in_flight`, one per session, or wait for drafts first.

    wait_s > 0: better drafts are expected within so many seconds, for the sessions `awaited`.
    """

    in_flight: list[InFlight]
    wait_s: float = 0.0
    awaited: tuple[Session, ...] = ()


class DraftPlanner:
    """Turns the trees at hand into the trees to verify, or asks for time where that pays."""

    def __init__(self, config: CoordinatorConfig, promises: PromiseBook) -> None:
        self._config = config
        self._promises = promises
        self._budgets: dict[str, BudgetController] = {}  # by target: each has its own step times
        self._calibrators: dict[tuple[str, str], Calibrator] = {}  # by drafter and task

    def plan(
        self,
        target_id: str,
        batch: Sequence[Session],
        limits: Limits,
        max_nodes: int | None,
        moment: Moment,
    ) -> Plan:
        """One item's worth of drafts per session; max_nodes: over the whole batch."""
        candidates = [self._candidate(session, limits) for session in batch]
        caps = [session.max_draft_tokens for session in batch]
        if max_nodes is not None and sum(caps) > max_nodes:
            caps = [min(cap, max_nodes // len(batch)) for cap in caps]
        if self._config.budget == "fixed":
            choices = [
                prune(candidate.tree, candidate.survival, cap)[2] if candidate else EMPTY_TOKENS
                for candidate, cap in zip(candidates, caps, strict=True)
            ]
        else:
            drafts = [
                self._draft(session, candidate, cap, moment)
                for session, candidate, cap in zip(batch, candidates, caps, strict=True)
            ]
            decision = self._budget(target_id).choose(drafts, moment.max_wait_s, moment.waited_s)
            if decision.wait_s > 0.0:
                awaited = tuple(batch[index] for index in decision.awaited)
                return Plan([], decision.wait_s, awaited)
            choices = decision.nodes
        return Plan(
            [
                _in_flight(session, candidate, kept)
                for session, candidate, kept in zip(batch, candidates, choices, strict=True)
            ]
        )

    def record_step(
        self, target_id: str, num_sequences: int, num_nodes: int, round_time_s: float
    ) -> None:
        """A step of decoding alone took so long, the way there and back included."""
        self._budget(target_id).record(num_sequences, num_nodes, round_time_s)

    def settle_round(
        self, target_id: str, shares: Sequence[Share], round_time_s: float | None, waited_s: float
    ) -> None:
        """Enter a finished round into the accounts; see `BudgetController.settle`."""
        self._budget(target_id).settle(shares, round_time_s, waited_s)

    def settle_promises(self) -> None:
        """Learn what drafters have sent so long after the last commits."""
        self._promises.settle(self._calibrator)

    def take_account(self, target_id: str) -> tuple[float, int]:
        """(deficit in seconds, refusals of the guard since this was last asked) of a target."""
        budget = self._budget(target_id)
        return budget.deficit_s, budget.take_refusals()

    def forget(self, target_id: str) -> None:
        """The target has left; its step times are of no more use."""
        self._budgets.pop(target_id, None)

    def learn(self, session: Session, in_flight: InFlight, verdict: Verdict) -> None:
        """Calibrate each drafter's claims by what the target accepted of its own nodes."""
        path = verdict.path.tolist()
        for index, claim in enumerate(in_flight.claims):
            is_own = (in_flight.sources >> np.uint64(index)) & np.uint64(1)
            own = np.flatnonzero(is_own).astype(np.int32)
            if len(own) == 0:
                continue
            tree = subtree(in_flight.tree, own)
            places = {node: place for place, node in enumerate(own.tolist())}
            # Its nodes are closed under parents, so its share of the path is a beginning of it.
            reached = [places[node] for node in path if node in places]
            self._calibrator(claim.drafter, session.request.task).observe_verdict(
                tree.parents, _claimed(claim, tree), np.array(reached, dtype=np.int32)
            )

    def _draft(
        self, session: Session, candidate: Candidate | None, cap: int, moment: Moment
    ) -> SequenceDraft:
        if session.guard is None:
            session.guard = DeficitGuard(self._config.max_slowdown, self._config.slowdown_slack)
        survival = candidate.survival if candidate else EMPTY_FLOATS
        promised = None
        if moment.max_wait_s > 0.0 and cap > 0:
            promised = self._promises.expected(session, survival, moment.now)
        return SequenceDraft(survival, max_nodes=cap, guard=session.guard, promised=promised)

    def _budget(self, target_id: str) -> BudgetController:
        budget = self._budgets.get(target_id)
        if budget is None:
            rules = BudgetRules(
                self._config.max_draft_tokens,
                max_slowdown=self._config.max_slowdown,
                slack_steps=self._config.slowdown_slack,
            )
            budget = BudgetController(rules, WAITS_S)
            self._budgets[target_id] = budget
        return budget

    def _calibrator(self, drafter: str, task: str) -> Calibrator:
        key = (drafter, task)
        calibrator = self._calibrators.get(key)
        if calibrator is None:
            if len(self._calibrators) >= _MAX_CALIBRATORS:
                # Tasks are named by clients; the oldest one makes room.
                del self._calibrators[next(iter(self._calibrators))]
            calibrator = self._calibrators[key] = Calibrator()
        return calibrator

    def _candidate(self, session: Session, limits: Limits) -> Candidate | None:
        """The union of the drafters' reachable trees, cut where the text must end."""
        claims: list[Claim] = []
        survivals: list[FloatArray] = []
        losses: list[float | None] = []
        for name in session.drafters:
            subscription = session.subscriptions.get(name)
            if subscription is None:
                continue
            held = _advance(session, subscription)
            if held is not None and held.calibrated is None:
                calibrator = self._calibrator(name, session.request.task)
                held.calibrated = calibrator.survival(held.tree.parents, held.survival)
            if subscription.growth is not None:
                subscription.growth.look(held)
            if held is None or held.calibrated is None:
                continue
            claims.append(Claim(name, held.tree, held.survival))
            survivals.append(held.calibrated)
            losses.append(subscription.log_loss)
        if not claims:
            return None
        candidate = _union(tuple(claims), survivals, losses)
        # A path of k accepted nodes emits k + 1 tokens: deeper nodes could never be emitted.
        max_depth = session.remaining_tokens(limits) - 1
        depth = depths(candidate.tree.parents)
        if int(depth.max()) > max_depth:
            candidate = candidate.keep(np.flatnonzero(depth <= max_depth).astype(np.int32))
        return candidate


def _advance(session: Session, subscription: Subscription) -> HeldTree | None:
    """Re-root the held tree at the last committed token.  None when nothing of it is left."""
    held = subscription.held
    if held is None:
        return None
    committed = session.tokens.since(held.base_len)
    if len(committed):
        result = reroot(held.tree, committed, held.survival)
        if not result.hit:
            subscription.held = None
            return None
        if held.calibrated is not None and result.node >= 0:
            reached = max(float(held.calibrated[result.node]), 1e-6)
            rest = np.minimum(held.calibrated[result.kept] / reached, 1.0)
            held.calibrated = rest.astype(np.float32)
        held.tree, held.survival = result.tree, result.survival
        held.base_len = len(session.tokens)
    return held if len(held.tree) else None


def _union(
    claims: tuple[Claim, ...],
    survivals: Sequence[FloatArray],
    losses: Sequence[float | None],
) -> Candidate:
    if len(claims) == 1:
        tree = claims[0].tree
        survival = monotone(tree.parents, survivals[0])
        return Candidate(tree, survival, np.ones(len(tree), dtype=np.uint64), claims)
    merged = merge([claim.tree for claim in claims], survivals, _weights(losses))
    return Candidate(merged.tree, merged.survival, merged.sources, claims)


def _in_flight(session: Session, candidate: Candidate | None, kept: TokenArray) -> InFlight:
    if candidate is None or len(kept) == 0:
        return InFlight(len(session.tokens))
    chosen = candidate.keep(kept)
    return InFlight(len(session.tokens), chosen.tree, chosen.sources, chosen.claims)


def _claimed(claim: Claim, part: TokenTree) -> FloatArray:
    """The survivals that a drafter claimed for `part`, a part of its tree in any order."""
    tree = claim.tree
    edges = {
        edge: node
        for node, edge in enumerate(
            zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True)
        )
    }
    nodes: list[int] = []
    for parent, token in zip(part.parents.tolist(), part.token_ids.tolist(), strict=True):
        nodes.append(edges[(-1 if parent < 0 else nodes[parent], token)])
    return claim.survival[nodes]


def _weights(losses: Sequence[float | None]) -> list[float] | None:
    """Trust in each drafter, by how well it has predicted this text; None = no evidence, equal.

    exp(-loss) is the geometric mean of the probabilities it gave to the committed tokens.
    """
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    best = min(known)
    return [math.exp(best - loss) for loss in known]
