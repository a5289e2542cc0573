"""What is known of a target: what its steps take, and how speculation fares at each load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.config.schema import CoordinatorConfig
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import NO_DRAFTS, Ask, DraftLengthValues
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_cost import CostTable, bucket, draft_shape, step_shape
from cluster.spec.step_profile import DraftTime, StepProfile
from cluster.spec.throttle import Throttle

# Share of the time that each kind of exploration may take: plain steps, steps of other sizes, and
# trees larger than what pays.
_EXPLORED_SHARE = 0.003
# Of the first ones of each kind: they are spread over a text, whose first words tell little of the
# rest.
_FIRST_SHARE = 0.05


@dataclass(slots=True)
class Turn:
    """One kind of exploration: when it was last done, and how often."""

    done_at: float = -math.inf
    num_done: int = 0

    def is_due(self, now: float, cost_s: float, num_first: int = 0) -> bool:
        """Whether what it costs is within its share of the time since it was last done.

        num_first: how many are first ones, 0 = as usual."""
        is_first = self.num_done < (num_first or evidence.FIRST_TRIES)
        share = _FIRST_SHARE if is_first else _EXPLORED_SHARE
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
class Load:
    """Batches of one law and of about so many sequences.

    tokens, time_s: weighted ones and the time they took, of late: their ratio is the rate.
    asked: what residents were asked for after the last step.  best: what pays.  is_longer: that was
    more, to see what it would be worth.  lengths, longer: of look-ups, and with models.
    num_new: texts that begin in a round, running mean.
    verify_s: what steps with drafts take longer than plain ones, running mean.  promised: tokens
    that the step under way is expected to accept, and whose trees say so.  trusts: in those of
    look-ups, and with models.
    """

    guard: DeficitGuard
    throttle: Throttle
    lengths: ByModels[DraftLengthValues]
    longer: ByModels[Turn]
    tokens: float = 0.0
    time_s: float = 0.0
    num_rounds: int = 0
    num_refusals: int = 0
    verify_s: float = 0.0
    promised: tuple[float, Trust] = field(default_factory=lambda: (0.0, Trust()))
    trusts: ByModels[Trust] = field(default_factory=lambda: (Trust(), Trust()))
    asked: Ask = NO_DRAFTS
    best: Ask = NO_DRAFTS
    is_longer: bool = False
    num_new: float = 0.0
    plain: Turn = field(default_factory=Turn)
    sizes: Turn = field(default_factory=Turn)

    def add(self, tokens: float, time_s: float) -> None:
        """A round has brought so many weighted tokens."""
        self.tokens += tokens - evidence.RECENT * self.tokens
        self.time_s += time_s - evidence.RECENT * self.time_s

    @property
    def trust(self) -> Trust:
        """In the trees at hand, which were asked for after the last step."""
        return self.trusts[self.asked.num_nodes > 0 and self.asked.with_models]

    def rate(self, plain_rate: float) -> float:
        """Weighted tokens per second of late, at least plain decoding's."""
        return max(plain_rate, self.tokens / self.time_s) if self.time_s else plain_rate


class TargetModel:
    """Costs are shared by both laws: a step takes what it takes under either."""

    def __init__(self, profile: StepProfile | None, draft_times: Sequence[DraftTime] = ()) -> None:
        """profile: of its steps, None = it has not measured any.  draft_times: of its residents."""
        self.steps = CostTable(step_shape(profile), is_in_seconds=profile is not None)
        self.drafting: ByModels[CostTable] = (CostTable(draft_shape), CostTable(draft_shape))
        self.read_s = 0.0  # what models take to read a text before they draft, running mean
        self.first = Turn()  # models' reading of a prompt at a load that is new
        self.loads: dict[tuple[bool, int], Load] = {}
        self._lengths: dict[tuple[bool, int], ByModels[DraftLengthValues]] = {}  # of former loads
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
            name = f"law={law_name(is_sampled=is_sampled)} sequences={size}"
            former = self._lengths.pop((is_sampled, size), None)
            lengths = former or (DraftLengthValues(), DraftLengthValues())
            look_ups, models = (Turn(num_done=each.num_learned) for each in lengths)
            longer = (look_ups, models)
            found = self.loads[is_sampled, size] = Load(guard, Throttle(name), lengths, longer)
        return found

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
        known = self._lengths | {key: load.lengths for key, load in self.loads.items()}
        lengths = [[*key, [each.export() for each in values]] for key, values in known.items()]
        return [self.steps.export(), [each.export() for each in self.drafting], lengths]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from what `export` gave; ValueError where it is of another form."""
        steps, drafting, lengths = state
        self.steps.restore(steps)
        for table, found in zip(self.drafting, drafting, strict=True):
            table.restore(found)
        for is_sampled, size, values in lengths:
            both = self._lengths[bool(is_sampled), int(size)] = (
                DraftLengthValues(), DraftLengthValues(),
            )  # fmt: skip
            for own, former in zip(both, values, strict=True):
                own.restore(former)

    def states(self, now: float) -> list[dict[str, object]]:
        """The state of each throttle."""
        return [
            {
                "law": law_name(is_sampled=is_sampled),
                "sequences": size,
                "state": load.throttle.state(now).value,
            }
            for (is_sampled, size), load in self.loads.items()
        ]

    def take_account(self) -> tuple[float, int]:
        """(deficit in seconds, refusals of the guard since this was last asked)."""
        num_refusals = sum(load.num_refusals for load in self.loads.values())
        for load in self.loads.values():
            load.num_refusals = 0
        return sum(load.guard.deficit_s for load in self.loads.values()), num_refusals
