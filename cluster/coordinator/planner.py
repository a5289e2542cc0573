"""Which draft nodes each sequence of a batch takes along: re-root, merge, and choose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.config import CoordinatorConfig
from cluster.coordinator.arrivals import ArrivalModel
from cluster.coordinator.calibration import CalibrationBook
from cluster.coordinator.demand import are_apart
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.offers import Offers, gather
from cluster.coordinator.session import Limits, Session
from cluster.core import EMPTY_FLOATS
from cluster.spec import merge_trees
from cluster.spec.arrivals import NUM_RANKS, WAITS_S
from cluster.spec.budget import BudgetController
from cluster.spec.drafts import (
    BatchDrafts,
    BudgetRules,
    SequenceDraft,
    Share,
    pack,
    rank_drafts,
)
from cluster.spec.forest import Indices, depths, ranked
from cluster.spec.guard import DeficitGuard
from cluster.spec.quiet import Silences
from cluster.spec.step_profile import StepProfile

# After so many rounds in a row in which no draft was worth verifying, drafters are given a pause.
_MAX_DECLINED = 4
# Speculation that over many rounds is less of a gain than this is none.
_MIN_GAIN = 1.01
# What shortens the next pause: more than the error of what plain steps would have taken without
# drafters, which is known from a few of them on a machine that is not always equally fast.
_SPELL_GAIN = 1.03


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
    is_trial: the wait is to show what comes in all that time, so nothing that comes ends it.
    """

    in_flight: list[InFlight]
    wait_s: float = 0.0
    awaited: tuple[Session, ...] = ()
    is_trial: bool = False


class DraftPlanner:
    """Turns the trees at hand into the trees to verify, or asks for time where that pays."""

    def __init__(self, config: CoordinatorConfig, arrivals: ArrivalModel) -> None:
        self._config = config
        self._arrivals = arrivals
        # By target, for each has its own step times, and by law: greedy text repeats itself, and
        # what speculation gains there says little of sampled text.
        self._budgets: dict[tuple[str, bool], BudgetController] = {}
        self._silent: dict[tuple[str, bool], Silences] = {}  # likewise
        # Likewise: those whose last batch had none but drafters that share no device with it.
        self._unshared: set[tuple[str, bool]] = set()
        self._profiles: dict[str, StepProfile | None] = {}  # by target
        self.calibration = CalibrationBook()
        merge_trees.prepare()

    def plan(
        self,
        target_id: str,
        batch: Sequence[Session],
        limits: Limits,
        max_nodes: int | None,
        moment: Moment,
    ) -> Plan:
        """One item's worth of drafts per session; max_nodes: over the whole batch."""
        key = target_id, any_sampled(batch)
        apart = [
            are_apart(subscription.replica, session.target)
            for session in batch
            for subscription in session.subscriptions.values()
        ]
        if all(apart) and apart:
            self._unshared.add(key)
        else:
            self._unshared.discard(key)
        if not apart or (self._silences(key).is_silent and not any(apart)):
            return Plan([InFlight(len(session.tokens)) for session in batch])
        offers = gather(batch, self.calibration.calibrator)
        if offers is not None:
            offers = _within_reach(batch, offers, limits)
        caps = [session.max_draft_tokens for session in batch]
        if max_nodes is not None and sum(caps) > max_nodes:
            caps = [min(cap, max_nodes // len(batch)) for cap in caps]
        if self._config.budget == "fixed":
            return Plan(_in_flight(batch, offers, _best(offers, caps)))
        reaches = (session.draft_length.max_nodes for session in batch)
        caps = [min(cap, reach) for cap, reach in zip(caps, reaches, strict=True)]
        drafts = self._drafts(batch, offers, caps, moment)
        budget = self._budget(key)
        choice = budget.decide(drafts, moment.max_wait_s, moment.waited_s)
        if choice.wait_s > 0.0:
            awaited = [batch[index] for index in choice.awaited]
            if choice.is_trial:
                self._learn_from(awaited)
            return Plan([], choice.wait_s, tuple(awaited), is_trial=choice.is_trial)
        if len(choice.nodes) < len(batch) and moment.max_wait_s > 0.0 and moment.waited_s == 0.0:
            trial_s = 0.0
            if any(self._arrivals.outstanding(session) for session in batch):
                trial_s = budget.trial_s(len(batch), moment.max_wait_s)
            if trial_s > 0.0:
                awaited = [session for session in batch if self._arrivals.outstanding(session)]
                self._learn_from(awaited)
                return Plan([], trial_s, tuple(awaited), is_trial=True)
        if budget.num_declined(len(batch)) >= _MAX_DECLINED:
            self._pause(key, len(batch), tells=True)
            budget.forget_declined()
        return Plan(_in_flight(batch, offers, choice.nodes))

    def _learn_from(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            self._arrivals.learn_from(session)

    def record_step(
        self,
        target_id: str,
        num_sequences: int,
        num_nodes: int,
        round_time_s: float | None,
        *,
        is_quiet: bool | None,
        is_sampled: bool = False,
    ) -> int:
        """A step of decoding alone took so long, the way there and back included; None = it was
        not measured.  is_quiet: without drafters at work; None = perhaps.  is_sampled: see
        `any_sampled`.

        Returns in how many rounds at least, as to batches of this law, the target's drafters are to
        be silent now; 0: they are not.
        """
        key = target_id, is_sampled
        budget, is_unshared = self._budget(key), key in self._unshared
        if round_time_s is not None:
            # Beside drafters that cost the target nothing a plain step is what it is anyway.
            is_quiet = False if is_unshared else is_quiet
            budget.record(num_sequences, num_nodes, round_time_s, is_quiet=is_quiet)
        if self._config.budget == "fixed" or is_unshared:
            return 0
        silences = self._silences(key)
        if not silences.is_silent and budget.is_exhausted(num_sequences):
            # What drafters take from plain steps is a loss as well.
            self._pause(key, num_sequences)
            return silences.num_left
        gain = budget.take_gain(num_sequences)
        if gain is not None and gain < _MIN_GAIN and not silences.is_silent:
            # Round by round they looked worth it, and taken together they are not: what they cost
            # when there is nothing to verify counts as well.
            self._pause(key, num_sequences)
            return silences.num_left
        silences.round_ended(
            num_sequences,
            is_sample=bool(is_quiet) and num_nodes == 0 and round_time_s is not None,
            factor=budget.quiet_factor(num_sequences),
        )
        return silences.num_left

    def settle_round(
        self,
        target_id: str,
        shares: Sequence[Share],
        round_time_s: float | None,
        waited_s: float,
        *,
        is_quiet: bool | None,
        is_sampled: bool = False,
    ) -> None:
        """Enter a finished round into the accounts; see `BudgetController.settle`."""
        key = target_id, is_sampled
        is_quiet = False if key in self._unshared else is_quiet
        self._budget(key).settle(shares, round_time_s, waited_s, is_quiet=is_quiet)

    def settle_arrivals(self) -> None:
        """Learn what drafters have sent so long after the last commits."""
        self._arrivals.settle(self.calibration.calibrator)

    def take_account(self, target_id: str) -> tuple[float, int]:
        """(deficit in seconds, refusals of the guard since this was last asked) of a target."""
        budgets = [self._budget((target_id, law)) for law in (False, True)]
        return (
            sum(budget.deficit_s for budget in budgets),
            sum(budget.take_refusals() for budget in budgets),
        )

    def meet(self, target_id: str, profile: StepProfile | None) -> None:
        """A target has joined; profile: of its steps, None = it has not measured any."""
        self._profiles[target_id] = profile

    def forget(self, target_id: str) -> None:
        """The target has left; its step times are of no more use."""
        for law in (False, True):
            self._budgets.pop((target_id, law), None)
            self._silent.pop((target_id, law), None)
            self._unshared.discard((target_id, law))
        self._profiles.pop(target_id, None)

    def _drafts(
        self, batch: Sequence[Session], offers: Offers | None, caps: list[int], moment: Moment
    ) -> BatchDrafts:
        """What the budget is to choose from."""
        guards: list[DeficitGuard] = []
        for session in batch:
            if session.guard is None:
                session.guard = DeficitGuard(self._config.max_slowdown, self._config.slowdown_slack)
            guards.append(session.guard)
        if offers is None:
            drafts = pack([SequenceDraft(EMPTY_FLOATS) for _ in batch], 0)
            drafts = replace(drafts, caps=np.array(caps, dtype=np.int64), guards=guards)
        else:
            forest = offers.forest
            drafts = rank_drafts(offers.survival, forest.owners, forest.starts, caps, guards)
        weights = [session.weight for session in batch]
        if any(weight != 1.0 for weight in weights):
            drafts = replace(drafts, weights=np.array(weights))
        if moment.max_wait_s == 0.0:
            return drafts
        expected = self._arrivals.expected(batch, drafts.profiles(NUM_RANKS), moment.now)
        if expected is None:
            return drafts
        arriving, is_arriving = expected
        return replace(drafts, arriving=arriving, is_arriving=is_arriving & (drafts.caps > 0))

    def _budget(self, key: tuple[str, bool]) -> BudgetController:
        """key: the target, and whether the batch is sampled."""
        budget = self._budgets.get(key)
        if budget is None:
            target_id, law = key
            rules = BudgetRules(
                self._config.max_draft_tokens,
                max_slowdown=self._config.max_slowdown,
                slack_steps=self._config.slowdown_slack,
                profile=self._profiles.get(target_id),
            )
            sibling = self._budgets.get((target_id, not law))
            budget = self._budgets[key] = BudgetController(rules, WAITS_S, sibling)
        return budget

    def _pause(self, key: tuple[str, bool], num_sequences: int, *, tells: bool = False) -> None:
        """tells: a few rounds say enough, for nothing in them was worth verifying."""
        gain = self._budget(key).take_spell(num_sequences)
        has_gained = None if gain is None and not tells else (gain or 0.0) > _SPELL_GAIN
        self._silences(key).pause(num_sequences, has_gained=has_gained)

    def _silences(self, key: tuple[str, bool]) -> Silences:
        silences = self._silent.get(key)
        if silences is None:
            silences = self._silent[key] = Silences()
        return silences


def any_sampled(batch: Iterable[Session]) -> bool:
    """The law of a batch, which is of one law where that can be."""
    return any(session.is_sampled for session in batch)


def _within_reach(batch: Sequence[Session], offers: Offers, limits: Limits) -> Offers:
    """Without the nodes that lie behind the end of their text.

    A path of k accepted nodes emits k + 1 tokens: deeper nodes could never be emitted.
    """
    max_depths = [session.remaining_tokens(limits) - 1 for session in batch]
    starts = offers.forest.starts
    if min(max_depths) >= int(np.diff(starts).max()):
        return offers
    is_within = depths(offers.forest.parents) <= np.array(max_depths)[offers.forest.owners]
    return offers if is_within.all() else offers.keep(is_within)


def _best(offers: Offers | None, caps: Sequence[int]) -> Indices:
    """Each session's best nodes, as many as its cap."""
    if offers is None:
        return np.empty(0, dtype=np.int64)
    forest = offers.forest
    nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
    return nodes[ranks < np.array(caps, dtype=np.int64)[forest.owners]]


def _in_flight(batch: Sequence[Session], offers: Offers | None, nodes: Indices) -> list[InFlight]:
    """An item for each session, with those of its nodes that were chosen."""
    if offers is None or len(nodes) == 0:
        return [InFlight(len(session.tokens)) for session in batch]
    is_chosen = np.zeros(offers.forest.num_nodes, dtype=np.bool_)
    is_chosen[nodes] = True
    chosen = offers.keep(is_chosen)
    forest, claimed = chosen.forest, chosen.claimed
    bounds = forest.starts.tolist()
    found: list[InFlight] = []
    rows = zip(batch, forest.split(), chosen.drafters, bounds, bounds[1:], strict=False)
    for session, tree, drafters, start, stop in rows:
        if start == stop:
            found.append(InFlight(len(session.tokens)))
            continue
        own = claimed[:, start:stop]
        if len(drafters) == 1:
            num_proposed: tuple[int, ...] = (stop - start,)
        else:
            num_proposed = tuple((~np.isnan(own[: len(drafters)])).sum(axis=1).tolist())
        found.append(InFlight(len(session.tokens), tree, drafters, num_proposed, own))
    return found
