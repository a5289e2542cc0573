"""Measured time of a target step by number of sequences and of draft nodes: T_v(B, N)."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from dataclasses import dataclass, field

# Steps between neighbours are at most a half; kernels' staircases lie at such sizes.
EDGES: tuple[int, ...] = (
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
)  # fmt: skip


def bucket(count: int) -> int:
    """The smallest edge that is not below `count`; what lies beyond the last edge is the last."""
    return EDGES[min(bisect.bisect_left(EDGES, count), len(EDGES) - 1)]


@dataclass(slots=True)
class _Cell:
    """The last times of one (sequences, nodes) bucket; their median ignores stray slow steps."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    recorded_at: int = 0

    def median(self) -> float:
        return statistics.median(self.times)


class StepTimes:
    """The table.  A cell counts as measured after `min_samples` steps: a shape's first step may
    compile or warm up.  A cell that saw nothing for `stale_after` steps keeps only its last two
    times when it does, so that a few fresh ones outvote them.
    """

    def __init__(self, min_samples: int = 3, stale_after: int = 64) -> None:
        self._min_samples = min_samples
        self._stale_after = stale_after
        self._cells: dict[int, dict[int, _Cell]] = {}  # by sequences, then nodes
        self._curves: dict[int, list[tuple[int, float]]] = {}  # monotone, dropped by `record`
        self._num_recorded = 0

    def record(self, num_sequences: int, num_nodes: int, step_time_s: float) -> None:
        """One step of decoding or verification, without prefill."""
        row = self._cells.setdefault(bucket(num_sequences), {})
        cell = row.setdefault(bucket(num_nodes), _Cell())
        if self._num_recorded - cell.recorded_at >= self._stale_after:
            while len(cell.times) >= self._min_samples:
                cell.times.popleft()
        cell.times.append(step_time_s)
        self._num_recorded += 1
        cell.recorded_at = self._num_recorded
        self._curves.pop(bucket(num_sequences), None)

    def is_measured(self, num_sequences: int, num_nodes: int) -> bool:
        cell = self._cells.get(bucket(num_sequences), {}).get(bucket(num_nodes))
        return cell is not None and len(cell.times) >= self._min_samples

    def age(self, num_sequences: int, num_nodes: int) -> int:
        """Steps recorded since this cell's last one; all of them when there was none."""
        cell = self._cells.get(bucket(num_sequences), {}).get(bucket(num_nodes))
        return self._num_recorded - (cell.recorded_at if cell is not None else 0)

    def frontier(self, num_sequences: int) -> int:
        """The largest measured number of nodes for so many sequences, 0 when none is.

        Like `estimate`, it goes by the nearest measured number of sequences.
        """
        return self._curve(num_sequences)[-1][0] if self._curve(num_sequences) else 0

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        """Step time in seconds; None while nothing is measured at all.

        Where plain steps of so many sequences are not measured, it is the time of the nearest
        number of sequences of which they are.  Between measured cells it is interpolated.  Beyond
        the last one it is that one's value: optimistic, so that what might pay is tried.
        """
        curve = self._curve(num_sequences)
        if not curve:
            return None
        nodes = bucket(num_nodes)
        place = bisect.bisect_left(curve, (nodes, -1.0))
        if place == len(curve):
            return curve[-1][1]
        if place == 0 or curve[place][0] == nodes:
            return curve[place][1]
        (low, low_time), (high, high_time) = curve[place - 1], curve[place]
        return low_time + (high_time - low_time) * (nodes - low) / (high - low)

    def _curve(self, num_sequences: int) -> list[tuple[int, float]]:
        """(nodes, time) of the measured cells, ascending in both."""
        key = self._nearest(bucket(num_sequences))
        curve = self._curves.get(key)
        if curve is None:
            measured = [
                (nodes, cell.median(), len(cell.times))
                for nodes, cell in sorted(self._cells.get(key, {}).items())
                if len(cell.times) >= self._min_samples
            ]
            curve = _monotone(measured)
            self._curves[key] = curve
        return curve

    def _nearest(self, sequences: int) -> int:
        """The bucket of sequences to go by: with plain steps measured, if any has them."""
        if self.is_measured(sequences, 0):
            return sequences
        measured = [key for key in self._cells if self.is_measured(key, 0)] or [
            key
            for key, row in self._cells.items()
            if any(len(cell.times) >= self._min_samples for cell in row.values())
        ]
        place = EDGES.index(sequences)
        return min(measured, key=lambda key: abs(EDGES.index(key) - place), default=sequences)


def _monotone(points: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The non-decreasing curve nearest to (nodes, time, weight): pool adjacent violators."""
    pools: list[tuple[float, float, list[int]]] = []  # mean, weight, nodes
    for nodes, time_s, weight in points:
        mean, total, members = time_s, float(weight), [nodes]
        while pools and pools[-1][0] > mean:
            above_mean, above_weight, above_members = pools.pop()
            mean = (mean * total + above_mean * above_weight) / (total + above_weight)
            total += above_weight
            members = above_members + members
        pools.append((mean, total, members))
    return [(nodes, mean) for mean, _, members in pools for nodes in members]
