"""What is known of a target: what its steps take, and how speculation fares at each load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import CoordinatorConfig
from cluster.spec import evidence
from cluster.spec.acceptance import law_name
from cluster.spec.budget import DraftLengthValues
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_cost import CostTable, bucket, draft_shape, step_shape
from cluster.spec.step_profile import StepProfile
from cluster.spec.throttle import Throttle

# Share of the time that each kind of exploration may take: plain steps, steps of other sizes, and
# trees larger than what pays.
_EXPLORED_SHARE = 0.003
# The first ones of each kind may take more, for until then nobody knows; but they are spread over a
# text, whose first words tell little of the rest.
_FIRST_TRIES = 4
_FIRST_SHARE = 0.05


@dataclass(slots=True)
class Turn:
    """One kind of exploration: when it was last done, how often, and how often at first."""

    num_first: int = _FIRST_TRIES
    done_at: float = -math.inf
    num_done: int = 0

    def is_due(self, now: float, cost_s: float) -> bool:
        """Whether what it costs is within its share of the time since it was last done."""
        share = _FIRST_SHARE if self.num_done < self.num_first else _EXPLORED_SHARE
        return now - self.done_at >= cost_s / share

    def take(self, now: float) -> None:
        self.done_at = now
        self.num_done += 1


@dataclass(slots=True, eq=False)
class Load:
    """Batches of one law and of about so many sequences.

    tokens, time_s: weighted ones and the time they took, of late: their ratio is the rate.
    asked: nodes that residents were asked for after the last step.  is_longer: these were more
    than what pays, to see what they would be worth.
    """

    guard: DeficitGuard
    throttle: Throttle
    lengths: DraftLengthValues = field(default_factory=DraftLengthValues)
    tokens: float = 0.0
    time_s: float = 0.0
    num_rounds: int = 0
    num_refusals: int = 0
    asked: int = 0
    is_longer: bool = False
    plain: Turn = field(default_factory=Turn)
    sizes: Turn = field(default_factory=Turn)
    longer: Turn = field(default_factory=lambda: Turn(num_first=evidence.FEW))

    def add(self, tokens: float, time_s: float) -> None:
        """A round has brought so many weighted tokens."""
        self.tokens += tokens - evidence.RECENT * self.tokens
        self.time_s += time_s - evidence.RECENT * self.time_s

    def rate(self, plain_rate: float) -> float:
        """Weighted tokens per second of late, at least plain decoding's."""
        return max(plain_rate, self.tokens / self.time_s) if self.time_s else plain_rate


class TargetModel:
    """Costs are shared by both laws: a step takes what it takes under either."""

    def __init__(self, target_id: str, profile: StepProfile | None) -> None:
        """profile: of its steps, None = it has not measured any."""
        self._id = target_id
        self.steps = CostTable(step_shape(profile), is_in_seconds=profile is not None)
        self.drafting = CostTable(draft_shape)
        self.loads: dict[tuple[bool, int], Load] = {}
        self._lengths: dict[tuple[bool, int], DraftLengthValues] = {}  # of former loads

    def load(self, config: CoordinatorConfig, num_sequences: int, *, is_sampled: bool) -> Load:
        """By bucket of sequences: what a crowd has lost, in steps of a crowd, would keep a lone
        request from speculating for a long time."""
        size = bucket(num_sequences)
        found = self.loads.get((is_sampled, size))
        if found is None:
            # The luck of n sequences together is their root as large, in steps, as that of one.
            slack_steps = config.slowdown_slack / math.sqrt(max(size, 1))
            guard = DeficitGuard(config.max_slowdown, slack_steps)
            name = f"target={self._id} law={law_name(is_sampled=is_sampled)} sequences={size}"
            lengths = self._lengths.pop((is_sampled, size), None) or DraftLengthValues()
            found = self.loads[is_sampled, size] = Load(guard, Throttle(name), lengths)
            found.longer.num_done = lengths.num_learned
        return found

    def export(self) -> list[Any]:
        """What was measured and learned of this target, as plain values."""
        known = self._lengths | {key: load.lengths for key, load in self.loads.items()}
        lengths = [[*key, values.export()] for key, values in known.items()]
        return [self.steps.export(), self.drafting.export(), lengths]

    def restore(self, state: Sequence[Any]) -> None:
        """Go on from what `export` gave; ValueError where it is of another form."""
        steps, drafting, lengths = state
        self.steps.restore(steps)
        self.drafting.restore(drafting)
        for is_sampled, size, values in lengths:
            found = DraftLengthValues()
            found.restore(values)
            self._lengths[bool(is_sampled), int(size)] = found

    def states(self, now: float) -> list[dict[str, object]]:
        """The state of each throttle."""
        return [
            {
                "target": self._id,
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
