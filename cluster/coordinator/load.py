"""What is known of a target: what its steps take, and how speculation fares at each load."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
# The first so many of each kind cost nothing: until then nobody knows.
_FREE_TRIES = 4


@dataclass(slots=True)
class Turn:
    """One kind of exploration: when it was last done, and how often."""

    done_at: float = -math.inf
    num_done: int = 0

    def is_due(self, now: float, cost_s: float) -> bool:
        """Whether what it costs is within its share of the time since it was last done."""
        if self.num_done < _FREE_TRIES:
            return True
        return now - self.done_at >= cost_s / _EXPLORED_SHARE

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
    longer: Turn = field(default_factory=Turn)

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
            found = self.loads[is_sampled, size] = Load(guard, Throttle(name))
        return found

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
