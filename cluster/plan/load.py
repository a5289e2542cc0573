"""The control loop's knowledge of a target: the times of its rounds, and speculation's gains by
load.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import SIZES, Arm, Ask, Exploration, Recent
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_profile import EDGES, NODE_EDGES, DraftTime, StepProfile, bucket
from cluster.spec.tree import Floats

# Predicts the time of a round as a sum of parts, each with a factor that is learned.
#
# A step consists of a plain step and of the rows beyond it. The profile gives both; their factors
# are the machine's present speed and the price of a row. Drafting consists of a call, its texts
# and their nodes. So each measurement informs the estimates of all sizes, and a machine that has
# become slower is not taken for a loss of speculation.


# After so many rounds a measurement counts about a third of what it counted at first.
_MEMORY = 64.0
# A round counts as at most so many times its expected time; beyond that, something else slowed it.
_STRAY = 2.0
# A factor falls to no less than this share of its prior.
_LEAST_SHARE = 0.001
# Rows at which computing costs as much as reading the weights, for a target without a profile.
_KNEE_ROWS = 32.0
# A drafting call takes as long as so many nodes, until that is measured: on two cores SmolLM2's
# residents take 3.6 ms for 1 node and 4.5 ms for 16.
_DRAFT_BASE = 16.0
# Sizes of rounds whose parts are kept: a target of 64 sequences meets a few per number of them.
_MAX_KEPT = 1024

# (sequences, other rows, numbers of nodes) -> the parts of such rounds: float64[nodes, parts].
Parts = Callable[[int, int, Floats], Floats]


def step_parts(profile: StepProfile | None) -> Parts:
    """Return the parts of a step by the target's profile: a plain step, and its nodes' rows."""

    def parts(num_sequences: int, num_others: int, num_nodes: Floats) -> Floats:
        rows = num_sequences + num_others + np.concatenate(([0.0], num_nodes))
        times = 1.0 + rows / _KNEE_ROWS if profile is None else profile.at(rows)
        return np.stack((np.full(len(num_nodes), times[0]), times[1:] - times[0]), axis=1)

    return parts


def draft_parts(num_sequences: int, num_others: int, num_nodes: Floats) -> Floats:
    """Return the parts of drafting: the call, its texts, its passes, and their nodes.

    num_nodes: of each text.
    """
    share = num_sequences / _KNEE_ROWS
    base = _DRAFT_BASE * (num_nodes > 0)
    return np.stack((base, share * base, num_nodes, share * num_nodes), axis=1)


class RoundTimes:
    """The times of rounds by numbers of sequences and nodes, fitted by least squares to the latest.

    num_recorded: the rounds that were recorded so far.
    """

    def __init__(self, parts: Parts, *, is_in_seconds: bool = False) -> None:
        """is_in_seconds: the parts are seconds, and are the estimate before any measurement."""

        @functools.lru_cache(_MAX_KEPT)  # every step asks for a few, and asks for them again
        def kept(num_sequences: int, num_others: int, num_nodes: tuple[int, ...]) -> Floats:
            return parts(num_sequences, num_others, np.array(num_nodes, dtype=np.float64))

        self._parts = kept
        self._prior: Floats = np.ones(kept(1, 0, (1,)).shape[1])
        self._factors: Floats | None = self._prior if is_in_seconds else None
        size = len(self._prior)
        # Sums over rounds, each round in units of its expected time.
        self._products, self._times = np.zeros((size, size)), np.zeros(size)
        self.num_recorded = 0

    def record(self, num_sequences: int, num_nodes: int, time_s: float) -> None:
        """Record the time of one round."""
        parts = self._parts(num_sequences, 0, (num_nodes,))[0]
        if self._factors is None:
            self._prior *= time_s / float(parts.sum())
            self._factors = self._prior
        expected_s = float(parts @ self._factors)
        scaled, ratio = parts / expected_s, min(time_s / expected_s, _STRAY)
        self.num_recorded += 1
        self._products += np.outer(scaled, scaled) - self._products / _MEMORY
        self._times += scaled * ratio - self._times / _MEMORY
        self._fit()

    def record_rows(self, num_sequences: int, num_rows: int, time_s: float) -> None:
        """Record the time of a step that had num_rows rows of prompts beside its sequences' rows.

        Such rows are not nodes, but until nodes are measured they are the best estimate of a row.
        """
        if self._factors is None or num_rows < _KNEE_ROWS:
            return
        plain, extra = self._parts(num_sequences, 0, (num_rows,))[0].tolist()
        price = max(time_s - float(self._factors[0]) * plain, 0.0) / extra if extra > 0.0 else 1.0
        self._prior = np.array([self._prior[0], 0.5 * (self._prior[1] + price)])
        self._fit()

    def _fit(self) -> None:
        # The prior counts as further rounds, with the same features as those that were recorded.
        num_rounds = max(min(self.num_recorded, _MEMORY), 1.0)
        beliefs = evidence.PRIOR / num_rounds * self._products.diagonal() + 1e-12
        weighed: Floats = self._products + np.diag(beliefs)
        times: Floats = self._times + beliefs * self._prior
        found: Floats = np.asarray(np.linalg.solve(weighed, times), dtype=np.float64)
        # Above zero, for the next round is measured in units of its expected time.
        self._factors = np.maximum(found, _LEAST_SHARE * self._prior)

    def at_edges(
        self, num_sequences: int, num_others: int = 0, num_nodes: tuple[int, ...] = EDGES
    ) -> Floats | None:
        """Return the seconds for each number of nodes; None while nothing is known.

        num_others: rows of prompts in the same step.
        """
        if self._factors is None:
            return None
        return self._parts(num_sequences, num_others, num_nodes) @ self._factors

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        found = self.at_edges(num_sequences, num_nodes=(num_nodes,))
        return None if found is None else float(found[0])

    def export(self) -> list[list[float]]:
        """Return the measurements as plain values."""
        factors = [] if self._factors is None else self._factors.tolist()
        return [factors, *evidence.exported(self._products, self._times)]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        factors, *sums = state
        found, products, times = (
            np.ones_like(each) for each in (self._prior, self._products, self._times)
        )
        evidence.restore([factors or found.tolist(), *sums], found, products, times)
        if (found <= 0.0).any() or (products < 0.0).any():
            raise ValueError("times of rounds that are none")
        if factors:
            self._factors = self._prior = found
        self._products, self._times = products, times
        self.num_recorded = math.ceil(float(products[0, 0])) if factors else 0


@dataclass(slots=True, eq=False)
class BatchGroup:
    """The batches of one law and of about the same number of sequences.

    arms: of its law, look-ups alone and look-ups with models: indexed by `Ask.with_models`.
    brought: weighted tokens of the latest rounds, and their time.  best: the ask that pays most.
    num_new: running mean of the texts that begin in a round.  verify_s: running mean of the time
    that steps with drafts take longer than plain ones.
    promised: the drafts that the step under way is expected to accept, and the arm to correct by
    the outcome.
    """

    arms: tuple[Arm, Arm]
    guard: DeficitGuard
    brought: Recent = field(default_factory=Recent)
    verify_s: float = 0.0
    promised: tuple[float, Arm] = field(default_factory=lambda: (0.0, Arm()))
    best: Ask | None = None
    num_new: float = 0.0

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
        weight = 1.0 / evidence.PRIOR if self.read_s else 1.0
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
        self.tries: defaultdict[tuple[bool, str], Exploration] = defaultdict(Exploration)
        self.arms = (Arm(), Arm()), (Arm(), Arm())  # greedy, sampled
        self.loads: dict[tuple[bool, int], BatchGroup] = {}
        self.latest: dict[bool, BatchGroup] = {}  # by law, that of the last batch
        for each in draft_times:
            self.drafting[each.drafter].learn(each)

    def load(self, config: CoordinatorConfig, batch: Sequence[Text]) -> BatchGroup:
        """Return the group of batches of about this size, which has a guard of its own.

        Otherwise the losses of large batches would long keep a single request from speculating.
        A batch counts as sampled if one of its texts is: it has texts of one law wherever possible.
        """
        size, is_sampled = bucket(len(batch)), any(text.is_sampled for text in batch)
        # Measured in steps, the standard deviation of the mean over n sequences is that of one
        # sequence divided by sqrt(n), and so is the loss by chance that the guard must allow.
        limits = config.max_slowdown, config.slowdown_slack / math.sqrt(max(size, 1))
        found = self.loads.get((is_sampled, size))
        if found is None:
            found = self.loads[is_sampled, size] = BatchGroup(
                self.arms[is_sampled], DeficitGuard(*limits)
            )
        found.guard.slowdown, found.guard.slack_steps = limits
        self.latest[is_sampled] = found
        return found

    def export(self) -> list[Any]:
        """Return what was measured and learned of this target, as plain values."""
        worth = [[each.export() for each in arms] for arms in self.arms]
        drafting = {name: each.times.export() for name, each in self.drafting.items()}
        return [self.steps.export(), drafting, worth]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue from a result of `export`; raises ValueError if it has another form."""
        steps, drafting, worth = state
        self.steps.restore(steps)
        for name, found in drafting.items():
            self.drafting[name].times.restore(found)
        for arms, values in zip(self.arms, worth, strict=True):
            for own, former in zip(arms, values, strict=True):
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
