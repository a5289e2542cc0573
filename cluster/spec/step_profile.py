"""The times of a target's steps and residents, and the speed-up that drafts bring at them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from cluster.records import frozen
from cluster.spec.evidence import isotonic
from cluster.spec.tree import Floats


@frozen
class StepProfile:
    """Step times by number of rows.

    rows: numbers of rows of a step, ascending.  times_s: the seconds of such steps.
    Only the ratios between the times are used: the steps of serving are measured too, and the
    times of sizes that have not occurred there follow from measured sizes by these ratios.
    """

    rows: tuple[int, ...]
    times_s: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[int], times_s: Sequence[float]) -> StepProfile | None:
        """Return a profile; None if there are too few points or a number is not usable."""
        is_sound = (
            len(rows) == len(times_s) >= 2
            and all(a < b for a, b in pairwise(rows))
            and rows[0] > 0
            and all(0.0 < time_s < float("inf") for time_s in times_s)
        )
        if not is_sound:
            return None
        smooth = isotonic(times_s, [1.0] * len(times_s))
        return cls(tuple(rows), tuple(smooth))

    def at(self, rows: Sequence[float] | np.ndarray) -> Floats:
        """Return the seconds for each number of rows, by interpolation; beyond the last point, with
        the slope of the upper half."""
        wanted = np.asarray(rows, dtype=np.float64)
        found = np.interp(wanted, self.rows, self.times_s)
        # The slope is not that of the last two points, which may differ by noise alone.
        half = bisect.bisect_right(self.rows, self.rows[-1] // 2) - 1
        first = max(half, 0)
        slope = (self.times_s[-1] - self.times_s[first]) / (self.rows[-1] - self.rows[first])
        return np.asarray(found + np.maximum(wanted - self.rows[-1], 0.0) * slope)


@frozen
class DraftTime:
    """The time of one turn of a resident, by its sequences and its nodes per sequence.

    num_read: number of texts that its model read first.
    """

    num_sequences: int
    num_nodes: int
    drafter: str
    is_look_up: bool
    time_s: float
    num_read: int = 0


# The sizes of steps, in nodes or in sequences, between which cost tables distinguish.


# From 2 on an edge is at most half as large again as the one before; kernels' costs jump at such
# sizes.
EDGES: tuple[int, ...] = (0, 1, *(base << power for power in range(10) for base in (2, 3)), 2048)
NODE_EDGES = np.array(EDGES)
# Numbers of nodes of a sequence that residents may be asked for, and for which acceptance is known.
DRAFT_LENGTHS = NODE_EDGES[(NODE_EDGES >= 1) & (NODE_EDGES <= 32)]
# No step commits more tokens of a text.  A model that lacks more of a text has to read it first, so
# the time of that turn is no measurement of drafting.
MAX_COMMIT = int(DRAFT_LENGTHS[-1]) + 1


def bucket(count: int) -> int:
    """Return the smallest edge that is not below `count`, or the last edge if all are below."""
    return EDGES[min(bisect.bisect_left(EDGES, count), len(EDGES) - 1)]


# The speed-up that drafts of one chain should bring, by formulas and by measured times.
#
# acceptance: the conditional one, the probability that a draft token is accepted if all before it
# were. num_drafts: draft tokens of a step. A server reports another number, accepted / drafted
# (`accepted_share`), which is lower: what follows a rejected token is lost too.


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
