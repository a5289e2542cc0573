"""The control loop's knowledge of a target: its step times, and speculation's gains by load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.plan.arms import SIZES, ArmWorth
from cluster.plan.costs import RoundTimes, draft_parts, step_parts
from cluster.plan.resident import DraftTurn
from cluster.plan.standing import Turn
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.forest import Floats
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_cost import NODE_EDGES, bucket
from cluster.spec.step_profile import DraftTime, StepProfile


@dataclass(slots=True)
class Trust:
    """The share of the promised tokens that are accepted.

    It is below 1 even if survivals are calibrated, because the nodes with the greatest survivals
    are chosen.  promised, held: promised and accepted tokens of the latest steps.
    """

    promised: float = evidence.FEW
    held: float = evidence.FEW

    def learn(self, promised: float, num_accepted: int) -> None:
        self.promised += promised - evidence.RECENT * self.promised
        self.held += num_accepted - evidence.RECENT * self.held

    @property
    def share(self) -> float:
        """Accepted tokens per promised token, at most 1."""
        return min(self.held / self.promised, 1.0)


# One value for look-ups alone and one for look-ups with models: indexed by `Ask.with_models`.
Each = TypeVar("Each")
ByModels = tuple[Each, Each]


@dataclass(slots=True, eq=False)
class Law:
    """The worth of drafts under one law, at any load.

    worth, trusts: of look-ups alone, and of look-ups with models.  tried: the exploration of trees
    other than those that pay.  load: the load of the batch that was planned last.
    """

    worth: ByModels[ArmWorth] = field(default_factory=lambda: (ArmWorth(), ArmWorth()))
    trusts: ByModels[Trust] = field(default_factory=lambda: (Trust(), Trust()))
    tried: ByModels[Turn] = field(default_factory=lambda: (Turn(), Turn()))
    load: Load | None = None


@dataclass(slots=True, eq=False)
class Load:
    """The batches of one law and of about the same number of sequences.

    tokens, time_s: weighted tokens of the latest rounds and their time; the ratio is the rate.
    asked: the drafts that residents were asked for after the last step.  best: the ask that pays
    most.  num_new: running mean of the texts that begin in a round.
    verify_s: running mean of the time that steps with drafts take longer than plain ones.
    promised: the drafts that the step under way is expected to accept, and the trust to correct by
    the outcome.
    """

    law: Law
    guard: DeficitGuard
    tokens: float = 0.0
    time_s: float = 0.0
    verify_s: float = 0.0
    promised: tuple[float, Trust] = field(default_factory=lambda: (0.0, Trust()))
    asked: Ask = NO_DRAFTS
    best: Ask | None = None
    num_new: float = 0.0

    def add(self, tokens: float, time_s: float) -> None:
        """Enter the weighted tokens and the time of a round."""
        self.tokens += tokens - evidence.RECENT * self.tokens
        self.time_s += time_s - evidence.RECENT * self.time_s

    @property
    def trust(self) -> Trust:
        """The trust in the trees that were asked for after the last step."""
        return self.law.trusts[self.asked.num_nodes > 0 and self.asked.with_models]

    def rate(self, plain_rate: float) -> float:
        """Return the recent weighted tokens per second, at least plain decoding's rate."""
        return max(plain_rate, self.tokens / self.time_s) if self.time_s else plain_rate


class DraftTimes:
    """The times of one resident's turns.

    read_s: running mean of the time in which it reads a text, beside drafting for it."""

    def __init__(self) -> None:
        self.times = RoundTimes(draft_parts)
        self.read_s = 0.0

    def learn(self, turn: DraftTurn) -> None:
        if not (turn.num_nodes and 0.0 < turn.time_s < math.inf):
            return
        if turn.num_read == 0:
            self.times.record(turn.num_texts, turn.num_nodes, turn.time_s)
            return
        drafting_s = self.times.estimate(turn.num_texts, turn.num_nodes) or 0.0
        read_s = (turn.time_s - drafting_s) / turn.num_read
        weight = 1.0 / evidence.FIRST_TRIES if self.read_s else 1.0
        self.read_s += weight * (max(read_s, 0.0) - self.read_s)

    def seconds(self, num_texts: int) -> Floats | None:
        """Return the seconds of a turn with trees of SIZES; None if none was measured."""
        times_s = self.times.at_edges(num_texts)
        return None if times_s is None else np.interp(SIZES, NODE_EDGES, times_s)


class TargetModel:
    """The costs and gains of one target.  Both laws share the costs: step times do not depend on
    the law."""

    def __init__(self, profile: StepProfile | None, draft_times: Sequence[DraftTime] = ()) -> None:
        """profile: its measured step times, None = none.  draft_times: those of its residents."""
        self.steps = RoundTimes(step_parts(profile), is_in_seconds=profile is not None)
        self.drafting: defaultdict[str, DraftTimes] = defaultdict(DraftTimes)  # by resident
        self._plain_s = self._spent_s = (
            0.0  # of the latest rounds: without drafts, and as they were
        )
        # By law and model, of those that are poor in all texts so far.
        self.tries: defaultdict[tuple[bool, str], Turn] = defaultdict(Turn)
        self.laws: ByModels[Law] = (Law(), Law())  # greedy, sampled
        self.loads: dict[tuple[bool, int], Load] = {}
        for each in draft_times:
            self.drafting[each.drafter].learn(
                DraftTurn(
                    each.drafter, each.num_sequences, each.num_nodes, each.time_s, each.num_read
                )
            )

    def load(self, config: CoordinatorConfig, num_sequences: int, *, is_sampled: bool) -> Load:
        """Return the load for batches of about this size, which has a guard of its own.

        Otherwise the losses of large batches would long keep a single request from speculating."""
        size = bucket(num_sequences)
        found = self.loads.get((is_sampled, size))
        if found is None:
            guard = DeficitGuard(*_limits(config, size))
            found = self.loads[is_sampled, size] = Load(self.laws[is_sampled], guard)
        return found

    def allow(self, config: CoordinatorConfig) -> None:
        """Let speculation cost as much as `config` says, at all loads so far."""
        for (_, size), load in self.loads.items():
            load.guard.allow(*_limits(config, size))

    def note_gain(self, plain_s: float, time_s: float) -> None:
        """Enter a round of time_s, whose tokens plain decoding would have emitted in plain_s."""
        self._plain_s += plain_s - evidence.RECENT * self._plain_s
        self._spent_s += time_s - evidence.RECENT * self._spent_s

    @property
    def speedup(self) -> float:
        """The speed of the latest rounds as a multiple of plain decoding's; 1 before the first."""
        return self._plain_s / self._spent_s if self._spent_s else 1.0

    def measured(self, num_sequences: int, num_nodes: int, step_time_s: float) -> None:
        """Enter the time of a step; 0 = not measured."""
        if step_time_s > 0.0:
            self.steps.record(num_sequences, num_nodes, step_time_s)

    def export(self) -> list[Any]:
        """Return what was measured and learned of this target, as plain values."""
        worth = [[each.export() for each in law.worth] for law in self.laws]
        drafting = {name: each.times.export() for name, each in self.drafting.items()}
        return [self.steps.export(), drafting, worth]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        steps, drafting, worth = state
        self.steps.restore(steps)
        for name, found in drafting.items():
            self.drafting[name].times.restore(found)
        for law, values in zip(self.laws, worth, strict=True):
            for own, turn, former in zip(law.worth, law.tried, values, strict=True):
                own.restore(former)
                turn.num_done = own.num_turns

    def states(self) -> list[dict[str, object]]:
        """Return the drafts that pay at each load so far, for status reports."""
        return [
            {
                "law": law_name(is_sampled=is_sampled),
                "sequences": size,
                "draft_nodes": 0 if load.best is None else load.best.num_nodes,
                "with_models": load.best is not None and load.best.with_models,
                "deficit_s": load.guard.deficit_s,
            }
            for (is_sampled, size), load in self.loads.items()
        ]

    @property
    def deficit_s(self) -> float:
        """Seconds that speculation has lost and not regained, over all loads."""
        return sum(load.guard.deficit_s for load in self.loads.values())


def _limits(config: CoordinatorConfig, size: int) -> tuple[float, float]:
    """Return the slowdown and the slack in steps that the guard of batches of `size` allows."""
    # Measured in steps, the standard deviation of the mean over n sequences is that of one
    # sequence divided by sqrt(n), and so is the loss by chance that the guard must allow.
    return config.max_slowdown, config.slowdown_slack / math.sqrt(max(size, 1))
