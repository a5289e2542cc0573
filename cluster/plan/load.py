"""What is known of a target: what its steps take, and how speculation fares at each load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from cluster.config.schema import CoordinatorConfig
from cluster.plan.arms import SIZES, ArmWorth
from cluster.plan.costs import RoundTimes, draft_parts, step_parts
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.forest import Floats
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_cost import NODE_EDGES, bucket
from cluster.spec.step_profile import DraftTime, StepProfile

# Share of the time that each kind of exploration may take: plain steps, and trees other than those
# that pay.
_EXPLORED_SHARE = 0.003
# Of the first ones of each kind: they are spread over a text, whose first words tell little of the
# rest.
_FIRST_SHARE = 0.05


@dataclass(slots=True)
class Turn:
    """One kind of exploration: when it was last done, and how often."""

    done_at: float = -math.inf
    num_done: int = 0

    def is_due(self, now: float, cost_s: float) -> bool:
        """True where what it costs is within its share of the time since it was last done."""
        share = _FIRST_SHARE if self.num_done < evidence.FIRST_TRIES else _EXPLORED_SHARE
        return now - self.done_at >= cost_s / share

    def take(self, now: float) -> None:
        self.done_at = now
        self.num_done += 1


@dataclass(slots=True)
class Trust:
    """How much of what trees promise is kept: nodes that are chosen are those that promise most.

    promised, held: tokens of late, and how many were accepted.
    """

    promised: float = evidence.FEW
    held: float = evidence.FEW

    def learn(self, promised: float, num_accepted: int) -> None:
        self.promised += promised - evidence.RECENT * self.promised
        self.held += num_accepted - evidence.RECENT * self.held

    @property
    def share(self) -> float:
        """Tokens that were accepted per token promised, at most 1."""
        return min(self.held / self.promised, 1.0)


# One for look-ups alone, and one for models beside them: by `Ask.with_models`.
Each = TypeVar("Each")
ByModels = tuple[Each, Each]


@dataclass(slots=True, eq=False)
class Law:
    """What drafts are worth under one law, whatever the load.

    worth, trusts: of look-ups, and with models.  tried: trees other than those that pay.  load: of
    the batch that was planned last.
    """

    worth: ByModels[ArmWorth] = field(default_factory=lambda: (ArmWorth(), ArmWorth()))
    trusts: ByModels[Trust] = field(default_factory=lambda: (Trust(), Trust()))
    tried: ByModels[Turn] = field(default_factory=lambda: (Turn(), Turn()))
    load: Load | None = None


@dataclass(slots=True, eq=False)
class Load:
    """Batches of one law and of about so many sequences.

    tokens, time_s: weighted ones and the time they took, of late: their ratio is the rate.
    asked: what residents were asked for after the last step.  best: what pays.
    num_new: texts that begin in a round, running mean.
    verify_s: what steps with drafts take longer than plain ones, running mean.  promised: tokens
    that the step under way is expected to accept, and whose trees say so.
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
    plain: Turn = field(default_factory=Turn)

    def add(self, tokens: float, time_s: float) -> None:
        """A round has brought so many weighted tokens."""
        self.tokens += tokens - evidence.RECENT * self.tokens
        self.time_s += time_s - evidence.RECENT * self.time_s

    @property
    def trust(self) -> Trust:
        """In the trees at hand, which were asked for after the last step."""
        return self.law.trusts[self.asked.num_nodes > 0 and self.asked.with_models]

    def rate(self, plain_rate: float) -> float:
        """Weighted tokens per second of late, at least plain decoding's."""
        return max(plain_rate, self.tokens / self.time_s) if self.time_s else plain_rate


class TargetModel:
    """Costs are shared by both laws: a step takes what it takes under either."""

    def __init__(self, profile: StepProfile | None, draft_times: Sequence[DraftTime] = ()) -> None:
        """profile: of its steps, None = it has not measured any.  draft_times: of its residents."""
        self.steps = RoundTimes(step_parts(profile), is_in_seconds=profile is not None)
        self.drafting: ByModels[RoundTimes] = (RoundTimes(draft_parts), RoundTimes(draft_parts))
        self.read_s = 0.0  # what models take to read a text before they draft, running mean
        self.first = Turn()  # models' reading of a prompt at a load that is new
        self.laws: ByModels[Law] = (Law(), Law())  # greedy, sampled
        self.loads: dict[tuple[bool, int], Load] = {}
        for each in draft_times:
            ask = Ask(each.num_nodes, each.with_models)
            self.measured_drafting(each.num_sequences, ask, each.time_s, each.num_read)

    def load(self, config: CoordinatorConfig, num_sequences: int, *, is_sampled: bool) -> Load:
        """By bucket of sequences: what a crowd has lost, in steps of a crowd, would keep a lone
        request from speculating for a long time."""
        size = bucket(num_sequences)
        found = self.loads.get((is_sampled, size))
        if found is None:
            # The luck of n sequences together is their root as large, in steps, as that of one.
            slack_steps = config.slowdown_slack / math.sqrt(max(size, 1))
            guard = DeficitGuard(config.max_slowdown, slack_steps)
            found = self.loads[is_sampled, size] = Load(self.laws[is_sampled], guard)
        return found

    def draft_s(self, num_sequences: int, num_new: float) -> ByModels[Floats | None]:
        """What each arm takes for trees of SIZES, models' reading of new texts included; None
        where it was never measured."""
        found: list[Floats | None] = []
        for table, read_s in zip(self.drafting, (0.0, self.read_s), strict=True):
            times_s = table.at_edges(num_sequences)
            if times_s is not None:
                times_s = np.interp(SIZES, NODE_EDGES, times_s) + num_new * read_s
            found.append(times_s)
        return found[0], found[1]

    def measured(self, num_sequences: int, num_nodes: int, step_time_s: float) -> None:
        """A step took so long; 0 = not measured."""
        if step_time_s > 0.0:
            self.steps.record(num_sequences, num_nodes, step_time_s)

    def measured_drafting(
        self, num_sequences: int, ask: Ask, draft_time_s: float, num_read: int = 0
    ) -> None:
        """What was asked of residents took so long; 0 = not measured.

        num_read: texts that models read before they drafted."""
        if ask.num_nodes == 0 or ask.unread or not 0.0 < draft_time_s < math.inf:
            return
        drafting = self.drafting[ask.with_models]
        if num_read == 0:
            drafting.record(num_sequences, ask.num_nodes, draft_time_s)
            return
        drafting_s = drafting.estimate(num_sequences, ask.num_nodes) or 0.0
        read_s = (draft_time_s - drafting_s) / num_read
        weight = 1.0 / evidence.FIRST_TRIES if self.read_s else 1.0
        self.read_s += weight * (max(read_s, 0.0) - self.read_s)

    def export(self) -> list[Any]:
        """What was measured and learned of this target, as plain values."""
        worth = [[each.export() for each in law.worth] for law in self.laws]
        return [self.steps.export(), [each.export() for each in self.drafting], worth]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from what `export` gave; ValueError where it is of another form."""
        steps, drafting, worth = state
        self.steps.restore(steps)
        for table, found in zip(self.drafting, drafting, strict=True):
            table.restore(found)
        for law, values in zip(self.laws, worth, strict=True):
            for own, turn, former in zip(law.worth, law.tried, values, strict=True):
                own.restore(former)
                turn.num_done = own.num_turns

    def states(self) -> list[dict[str, object]]:
        """What pays at each load that there was, for status reports."""
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
