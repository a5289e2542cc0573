"""The speed-up that drafts of one chain should bring, by formulas and by measured times.

acceptance: the conditional one, the probability that a draft token is accepted if all before it
were.  num_drafts: draft tokens of a step.  A server reports another number, accepted / drafted
(`accepted_share`), which is lower: what follows a rejected token is lost too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.records import frozen
from cluster.spec.forest import Floats
from cluster.spec.step_profile import DraftTime, StepProfile

# Chains that are considered for the best length.
LENGTHS = range(1, 17)
_BISECTIONS = 20

# The speed-up by acceptance and draft tokens.
Speedup = Callable[[float, int], float]


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Return the mean tokens of a step, the target's own included: (1 - a^(k+1)) / (1 - a)."""
    return sum(acceptance**place for place in range(num_drafts + 1))


def accepted_share(acceptance: float, num_drafts: int) -> float:
    """Return the share of draft tokens that are accepted, as servers report it."""
    return (expected_tokens(acceptance, num_drafts) - 1.0) / num_drafts


def by_guide(acceptance: float, num_drafts: int) -> float:
    """Return (k + 1 - a) / (k (1 - a) + 1), a rule of thumb in which drafting costs nothing."""
    return (num_drafts + 1 - acceptance) / (num_drafts * (1.0 - acceptance) + 1.0)


def by_leviathan(acceptance: float, num_drafts: int, cost: float) -> float:
    """Return (1 - a^(k+1)) / ((1 - a) (c k + 1)): Leviathan et al. 2023, theorem 3.8, in which a
    verification of any length takes as long as a plain step.

    cost: c, the time of one of the drafter's tokens as a share of a plain step.
    """
    return expected_tokens(acceptance, num_drafts) / (cost * num_drafts + 1.0)


def best_length(speedup: Speedup, acceptance: float) -> int:
    """Return the draft tokens with the greatest speed-up; 0 if none is above 1."""
    best = max(LENGTHS, key=lambda length: speedup(acceptance, length))
    return best if speedup(acceptance, best) > 1.0 else 0


def break_even(speedup: Speedup) -> float | None:
    """Return the least acceptance from which drafts of some length pay; None = not even if all are
    accepted."""
    low, high = 0.0, 1.0
    if not best_length(speedup, high):
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if best_length(speedup, middle) else (middle, high)
    return high


@frozen
class MeasuredCosts:
    """The times of a target's steps by rows, and of its residents' turns.

    models: of draft models, their own steps by rows: a chain takes as many steps as it has tokens,
    while a turn that was timed may have given up an unlikely one.  outside_s: what a step takes
    beside the forward pass, with drafts or without."""

    steps: StepProfile
    drafts: Sequence[DraftTime] = ()
    models: Sequence[StepProfile] = ()
    outside_s: float = 0.0

    def speedup(self, num_sequences: int, *, with_models: bool) -> Speedup:
        """Return the speed-up of so many requests at a time.

        with_models: draft models draft too, not look-ups alone.
        """
        plain_s = float(self.steps.at([num_sequences])[0]) + self.outside_s

        def speedup(acceptance: float, num_drafts: int) -> float:
            step_s = float(self.steps.at([num_sequences * (num_drafts + 1)])[0])
            draft_s = self.draft_s(num_sequences, num_drafts, with_models=with_models)
            drafted_s = step_s + self.outside_s + draft_s
            return expected_tokens(acceptance, num_drafts) * plain_s / drafted_s

        return speedup

    def draft_s(self, num_sequences: int, num_drafts: int, *, with_models: bool) -> float:
        """Return the time of the residents' turns, between and beyond the measured ones by lines;
        or that of the models' steps, where it is longer."""
        steps_s = num_drafts * sum(float(each.at([num_sequences])[0]) for each in self.models)
        turns = [each for each in self.drafts if not each.num_read]
        names = {each.drafter for each in turns if with_models or each.is_look_up}
        turns_s = [
            _turn_s([each for each in turns if each.drafter == name], num_sequences, num_drafts)
            for name in names
        ]
        return max(sum(turns_s), steps_s * with_models, 0.0)


def _turn_s(turns: Sequence[DraftTime], num_sequences: int, num_drafts: int) -> float:
    """Return the time of one resident's turn by its measured ones."""
    counts = sorted({each.num_sequences for each in turns})
    times_s = [
        _at(
            num_drafts,
            sorted((each.num_nodes, each.time_s) for each in turns if each.num_sequences == count),
        )
        for count in counts
    ]
    return _at(num_sequences, list(zip(counts, times_s, strict=True)))


def _at(wanted: int, points: Sequence[tuple[int, float]]) -> float:
    """Interpolate; beyond the ends along the first and the last line."""
    xs: Floats = np.array([x for x, _ in points], dtype=np.float64)
    ys: Floats = np.array([y for _, y in points])
    if len(points) == 1:
        return float(ys[0])
    place = int(np.clip(np.searchsorted(xs, wanted) - 1, 0, len(points) - 2))
    slope = (ys[place + 1] - ys[place]) / (xs[place + 1] - xs[place])
    return float(ys[place] + slope * (wanted - xs[place]))
