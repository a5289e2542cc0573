"""What a drafter's tree is worth so long after a commit: the price list of waiting for drafts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray

Floats = npt.NDArray[np.float64]

# Seconds since the commit.  A tree that needs longer than the last is not worth waiting for.
GRID_S: tuple[float, ...] = (0.0, 0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016)
# The waits that are priced.
WAITS_S: tuple[float, ...] = GRID_S[1:]
_GRID_S = np.array(GRID_S)
_NOW_AND_LATER_S = np.array((0.0, *WAITS_S))
# Survivals that are kept of a tree, best first.
NUM_RANKS = 16
# Weight of the newest commit, once there were enough for a plain mean.
_MIN_WEIGHT = 0.05
# Times since the commit that are told apart when a wait is priced.
_TICK_S = 0.00025


def profile(survival: FloatArray) -> Floats:
    """The greatest survivals in descending order, zeros after them: float64[NUM_RANKS]."""
    best = np.sort(survival)[::-1][:NUM_RANKS]
    padded = np.zeros(NUM_RANKS)
    padded[: len(best)] = best
    return padded


class ArrivalTable:
    """Mean profiles of one drafter's newest tree, by time since the commit, for one task.

    Hits, where a part of the former tree outlived the commit, and misses are learned apart: after
    a miss there is nothing at first.  A commit that brought no tree counts as zeros, so that
    little is expected of a drafter whose trees do not come.

    What came while the target was idle is learned apart too, and goes before what came while it
    was at work: that is how it comes during a wait, and where drafters share a device with the
    target it comes several times as fast.
    """

    def __init__(self) -> None:
        # By: the target idle or not; hit or miss.
        self._means = np.zeros((2, 2, len(GRID_S), NUM_RANKS))
        self._counts = np.zeros((2, 2, len(GRID_S)), dtype=np.int64)
        self._curves: dict[tuple[bool, int], Floats] = {}  # as asked for, dropped by `observe`

    def observe(
        self,
        *,
        hit: bool,
        elapsed_s: float,
        trees: Sequence[tuple[float, FloatArray]],
        idle_s: float = 0.0,
    ) -> None:
        """One commit and what followed, up to elapsed_s: later times are unknown.

        trees: (seconds since the commit, calibrated survivals) in order of arrival; of a hit the
        first stands at 0.  idle_s: so long the target did nothing.
        """
        self._curves.clear()
        profiles = np.zeros((len(trees) + 1, NUM_RANKS))
        for place, (_, survival) in enumerate(trees, start=1):
            profiles[place] = profile(survival)
        times_s = [at_s for at_s, _ in trees]
        newest = np.searchsorted(times_s, GRID_S, side="right")
        num_known = bisect.bisect_right(GRID_S, elapsed_s)
        self._learn(0, hit, profiles[newest[:num_known]])
        num_idle = bisect.bisect_right(GRID_S, idle_s)
        num_came = bisect.bisect_right(times_s, idle_s)
        if 0 < num_idle < len(GRID_S) and num_came > newest[num_idle - 1]:
            # A wait ends when something comes.  By the next mark there would be that, if not more.
            newest[num_idle] = num_came
            num_idle += 1
        self._learn(1, hit, profiles[newest[:num_idle]])

    def _learn(self, is_idle: int, hit: bool, profiles: Floats) -> None:
        """profiles: of the first marks of the grid."""
        counts = self._counts[is_idle, int(hit), : len(profiles)]
        means = self._means[is_idle, int(hit), : len(profiles)]
        counts += 1
        means += np.maximum(1.0 / counts, _MIN_WEIGHT)[:, np.newaxis] * (profiles - means)

    def expected(self, *, hit: bool, since_s: float, at_hand: Floats) -> Floats:
        """Survivals after each of WAITS_S, best first: float64[WAITS_S, NUM_RANKS].

        at_hand: those of since_s, as `profile` gives them.  They grow by what trees usually gain in
        the time, but not beyond what trees usually are by then: what has come early does not come
        again, and what should have come by now will not.  Interpolated in time; nothing is
        expected of times beyond the last one seen.
        """
        return grown(self.curves(hit=hit, since_s=since_s), at_hand)

    def curves(self, *, hit: bool, since_s: float) -> Floats:
        """What trees usually are then and after each of WAITS_S: float64[1 + WAITS_S, NUM_RANKS].

        The same array for the same answer, until the next `observe`.
        """
        key = (hit, int(since_s / _TICK_S))
        curves = self._curves.get(key)
        if curves is None:
            # A later tree holds the earlier one, so a mean that falls is noise, or was never seen.
            is_known = self._counts[1, int(hit)] > 0
            means = np.where(is_known[:, np.newaxis], *self._means[::-1, int(hit)])
            curve = np.maximum.accumulate(means, axis=0)
            curves = self._curves[key] = _at(curve, key[1] * _TICK_S + _NOW_AND_LATER_S)
        return curves


def grown(curves: Floats, at_hand: Floats) -> Floats:
    """Survivals to expect: float64[..., WAITS_S, NUM_RANKS]; see `ArrivalTable.expected`.

    curves: float64[..., 1 + WAITS_S, NUM_RANKS].  at_hand: float64[..., NUM_RANKS].
    """
    usual, present = curves[..., 1:, :], at_hand[..., np.newaxis, :]
    growth = np.minimum(usual - curves[..., :1, :], usual - present)
    return np.asarray(present + np.maximum(growth, 0.0))


def _at(curve: Floats, times_s: Floats) -> Floats:
    """The curve, one row for each point of the grid, at these times; beyond the last the last."""
    high = np.minimum(_GRID_S.searchsorted(times_s, side="right"), len(GRID_S) - 1)
    low = high - 1
    shares = np.minimum((times_s - _GRID_S[low]) / (_GRID_S[high] - _GRID_S[low]), 1.0)
    return np.asarray(curve[low] + shares[:, np.newaxis] * (curve[high] - curve[low]))
