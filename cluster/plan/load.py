"""The control loop's knowledge of a target: its step times, and speculation's gains by load."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.plan.arms import SIZES, Arm, Recent
from cluster.plan.costs import RoundTimes, draft_parts, step_parts
from cluster.plan.standing import Turn
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.forest import Floats
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_cost import NODE_EDGES, bucket
from cluster.spec.step_profile import DraftTime, StepProfile


@dataclass(slots=True, eq=False)
class Law:
    """The worth of drafts under one law, at any load.

    arms: look-ups alone, and look-ups with models: indexed by `Ask.with_models`.  load: the load of
    the batch that was planned last.
    """

    arms: tuple[Arm, Arm] = field(default_factory=lambda: (Arm(), Arm()))
    load: Load | None = None


@dataclass(slots=True, eq=False)
class Load:
    """The batches of one law and of about the same number of sequences.

    brought: weighted tokens of the latest rounds, and their time.  asked: the drafts that residents
    were asked for after the last step.  best: the ask that pays most.  num_new: running mean of the
    texts that begin in a round.  verify_s: running mean of the time that steps with drafts take
    longer than plain ones.
    promised: the drafts that the step under way is expected to accept, and the arm to correct by
    the outcome.
    """

    law: Law
    guard: DeficitGuard
    brought: Recent = field(default_factory=Recent)
    verify_s: float = 0.0
    promised: tuple[float, Arm] = field(default_factory=lambda: (0.0, Arm()))
    asked: Ask = NO_DRAFTS
    best: Ask | None = None
    num_new: float = 0.0

    @property
    def arm(self) -> Arm:
        """The arm whose trees were asked for after the last step."""
        return self.law.arms[self.asked.num_nodes > 0 and self.asked.with_models]

    def rate(self, plain_rate: float) -> float:
        """Return the recent weighted tokens per second, at least plain decoding's rate."""
        return max(plain_rate, self.brought.ratio(plain_rate))


class DraftTimes:
    """The times of one resident's turns.

    read_s: running mean of the time in which it reads a text, beside drafting for it."""

    def __init__(self) -> None:
        self.times = RoundTimes(draft_parts)
        self.read_s = 0.0

    def learn(self, turn: DraftTime) -> None:
        if not (turn.num_nodes and 0.0 < turn.time_s < math.inf):
            return
        if turn.num_read == 0:
            self.times.record(turn.num_sequences, turn.num_nodes, turn.time_s)
            return
        drafting_s = self.times.estimate(turn.num_sequences, turn.num_nodes) or 0.0
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
        self.pace = Recent()  # seconds of the latest rounds: without drafts, and as they were
        # By law and model, of those that are poor in all texts so far.
        self.tries: defaultdict[tuple[bool, str], Turn] = defaultdict(Turn)
        self.laws = Law(), Law()  # greedy, sampled
        self.loads: dict[tuple[bool, int], Load] = {}
        for each in draft_times:
            self.drafting[each.drafter].learn(each)

    def load(self, config: CoordinatorConfig, batch: Sequence[Text]) -> Load:
        """Return the load for batches of about this size, which has a guard of its own.

        Otherwise the losses of large batches would long keep a single request from speculating.
        A batch counts as sampled if one of its texts is: it has texts of one law wherever possible.
        """
        size, is_sampled = bucket(len(batch)), any(text.is_sampled for text in batch)
        # Measured in steps, the standard deviation of the mean over n sequences is that of one
        # sequence divided by sqrt(n), and so is the loss by chance that the guard must allow.
        limits = config.max_slowdown, config.slowdown_slack / math.sqrt(max(size, 1))
        found = self.loads.get((is_sampled, size))
        if found is None:
            found = self.loads[is_sampled, size] = Load(
                self.laws[is_sampled], DeficitGuard(*limits)
            )
        found.guard.slowdown, found.guard.slack_steps = limits
        return found

    def export(self) -> list[Any]:
        """Return what was measured and learned of this target, as plain values."""
        worth = [[each.export() for each in law.arms] for law in self.laws]
        drafting = {name: each.times.export() for name, each in self.drafting.items()}
        return [self.steps.export(), drafting, worth]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        steps, drafting, worth = state
        self.steps.restore(steps)
        for name, found in drafting.items():
            self.drafting[name].times.restore(found)
        for law, values in zip(self.laws, worth, strict=True):
            for own, former in zip(law.arms, values, strict=True):
                own.restore(former)

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
