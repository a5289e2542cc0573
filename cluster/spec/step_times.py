"""Measured time of a target step by number of sequences and of draft nodes: T_v(B, N)."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cluster.spec.forest import Floats
from cluster.spec.isotonic import isotonic
from cluster.spec.step_profile import StepProfile

# Steps between neighbours are at most a half; kernels' staircases lie at such sizes.
EDGES: tuple[int, ...] = (
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
)  # fmt: skip


# By count up to the last edge, where the smallest edge stands that is not below it: planning one
# step asks some forty times.
_PLACES = tuple(bisect.bisect_left(EDGES, count) for count in range(EDGES[-1] + 1))


def bucket(count: int) -> int:
    """The smallest edge that is not below `count`; what lies beyond the last edge is the last."""
    return EDGES[_place(count)]


def _place(count: int) -> int:
    return _PLACES[count] if count < len(_PLACES) else len(EDGES) - 1


# So many samples in a row off by so much: the load has changed, it was no stray slow step.
_NUM_CHANGED = 3
_CHANGE = 1.2


@dataclass(slots=True)
class _Cell:
    """The last times of one (sequences, nodes) bucket; their median ignores stray slow steps.

    num_doubtful: fresh samples it takes before the cell is believed again.
    believed_s: its median before a long pause, when the first sample after that raised the doubt.
    """

    times: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    recorded_at: int = 0
    num_doubtful: int = 0
    believed_s: float | None = None

    def median(self) -> float:
        return statistics.median(self.times)

    def high(self) -> float:
        """A high quantile: of nine samples the two slowest may be strays."""
        return sorted(self.times)[-1 - max(len(self.times) // 4, len(self.times) > 1)]

    def weight(self) -> float:
        """How much it counts beside its neighbours: one in doubt moves none that is not."""
        return 1e-3 if self.num_doubtful else float(len(self.times))

    def keep(self, count: int) -> None:
        """Forget all but the last samples."""
        while len(self.times) > count:
            self.times.popleft()

    def change(self, believed_s: float | None = None) -> float | None:
        """By what factor the last samples differ from what was believed; None: they do not.

        believed_s: None = the median of all samples before those.
        """
        recent = list(self.times)[-_NUM_CHANGED:]
        older = list(self.times)[:-_NUM_CHANGED]
        if believed_s is None and len(older) < _NUM_CHANGED:
            return None
        usual = statistics.median(older) if believed_s is None else believed_s
        if min(recent) > usual * _CHANGE or max(recent) * _CHANGE < usual:
            return statistics.median(recent) / usual
        return None

    def doubt(self, factor: float) -> None:
        """Its neighbour has changed by `factor`; perhaps it has too, until it is measured."""
        self.times = deque((time_s * factor for time_s in self.times), maxlen=self.times.maxlen)
        self.num_doubtful = _NUM_CHANGED
        self.believed_s = None


class StepTimes:
    """The table.  A cell counts as measured after `min_samples` steps: a shape's first step may
    compile or warm up.  A cell that saw nothing for `stale_after` steps keeps only its last two
    times when it does, so that a few fresh ones outvote them.  Where a cell has changed for good,
    its old samples go, and the others of its row are presumed to have changed alike: most changes
    are the machine's.  They are doubtful then, which asks the caller to measure them.
    """

    def __init__(
        self, min_samples: int = 3, stale_after: int = 64, profile: StepProfile | None = None
    ) -> None:
        """profile: of the target's steps by rows; a sequence has a row, and a node another."""
        self._profile = profile
        self._min_samples = min_samples
        self._stale_after = stale_after
        self._cells: dict[int, dict[int, _Cell]] = {}  # by sequences, then nodes
        self._curves: dict[int, list[tuple[int, float]]] = {}  # monotone, dropped by `record`
        # Answers since the last `record`: a choice asks for the same often.
        self._rows: dict[int, Floats | None] = {}  # estimates at all EDGES, by sequences
        self._highs: dict[tuple[int, int], float | None] = {}
        self.num_recorded = 0

    def record(self, num_sequences: int, num_nodes: int, step_time_s: float) -> None:
        """One step of decoding or verification, without prefill."""
        row = self._cells.setdefault(bucket(num_sequences), {})
        cell = row.setdefault(bucket(num_nodes), _Cell())
        if self.num_recorded - cell.recorded_at >= self._stale_after:
            self._resume(cell, step_time_s)
        cell.times.append(step_time_s)
        if not cell.num_doubtful:
            self._notice_change(row, cell, cell.change())
        elif cell.num_doubtful == 1:
            cell.num_doubtful = 0
            cell.keep(_NUM_CHANGED)
            if cell.believed_s is not None:
                self._notice_change(row, cell, cell.change(cell.believed_s))
        else:
            cell.num_doubtful -= 1
        self.num_recorded += 1
        cell.recorded_at = self.num_recorded
        self._curves.pop(bucket(num_sequences), None)
        self._rows.clear()
        self._highs.clear()

    def _resume(self, cell: _Cell, step_time_s: float) -> None:
        """The first sample after a long pause is coming; is it what was believed?"""
        if len(cell.times) >= self._min_samples and not cell.num_doubtful:
            believed_s = cell.median()
            if not believed_s / _CHANGE <= step_time_s <= believed_s * _CHANGE:
                cell.num_doubtful, cell.believed_s = _NUM_CHANGED, believed_s
        cell.keep(self._min_samples - 1)

    @staticmethod
    def _notice_change(row: dict[int, _Cell], changed: _Cell, factor: float | None) -> None:
        if factor is None:
            return
        changed.keep(_NUM_CHANGED)
        for cell in row.values():
            if cell is not changed:
                cell.doubt(factor)

    def is_doubtful(self, num_sequences: int, num_nodes: int) -> bool:
        """Whether the cell's row has changed since it was measured."""
        cell = self._cells.get(bucket(num_sequences), {}).get(bucket(num_nodes))
        return cell is not None and cell.num_doubtful > 0

    def is_measured(self, num_sequences: int, num_nodes: int) -> bool:
        cell = self._cells.get(bucket(num_sequences), {}).get(bucket(num_nodes))
        return cell is not None and len(cell.times) >= self._min_samples

    def age(self, num_sequences: int, num_nodes: int) -> int:
        """Steps recorded since this cell's last one; all of them when there was none."""
        cell = self._cells.get(bucket(num_sequences), {}).get(bucket(num_nodes))
        return self.num_recorded - (cell.recorded_at if cell is not None else 0)

    def frontier(self, num_sequences: int) -> int:
        """The largest measured number of nodes for so many sequences, 0 when none is.

        Like `estimate`, it goes by the nearest measured number of sequences.
        """
        return self._curve(num_sequences)[-1][0] if self._curve(num_sequences) else 0

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        """Step time in seconds; None while nothing is measured at all.

        Where plain steps of so many sequences are not measured, it is the time of the nearest
        number of sequences of which they are.  Between measured cells it is interpolated.  Beyond
        the last one it is that one's value: optimistic, so that what might pay is tried.  With a
        profile, what is interpolated is the ratio to that.
        """
        row = self.at_edges(num_sequences)
        if row is None:
            return None
        return float(row[_place(num_nodes)])

    def at_edges(self, num_sequences: int) -> Floats | None:
        """The estimates for each number of nodes in EDGES: float64[edges]."""
        if num_sequences not in self._rows:
            self._rows[num_sequences] = self._at_edges(num_sequences)
        return self._rows[num_sequences]

    def _at_edges(self, num_sequences: int) -> Floats | None:
        curve = self._curve(num_sequences)
        if not curve:
            return None
        nodes, times_s = (np.array(column, dtype=np.float64) for column in zip(*curve, strict=True))
        if self._profile is None:
            return np.asarray(np.interp(EDGES, nodes, times_s))
        sequences = bucket(num_sequences)
        usual = self._profile.at(sequences + np.array(EDGES))
        measured = self._profile.at(self._nearest(sequences) + nodes)
        ratios = np.interp(EDGES, nodes, times_s / measured)
        return np.asarray(np.maximum.accumulate(usual * ratios))

    def high(self, num_sequences: int, num_nodes: int) -> float | None:
        """A high quantile of recent step times, at least the estimate; None while unmeasured.

        It looks at the cell itself and, where that is not measured, at its neighbours in nodes.
        What was measured long ago is not recent: the estimate must do then, or a row of stray
        slow steps would keep a shape from ever being measured again.
        """
        key = (num_sequences, num_nodes)
        if key not in self._highs:
            self._highs[key] = self._high(num_sequences, num_nodes)
        return self._highs[key]

    def _high(self, num_sequences: int, num_nodes: int) -> float | None:
        estimate = self.estimate(num_sequences, num_nodes)
        if estimate is None:
            return None
        row = self._cells.get(self._nearest(bucket(num_sequences)), {})
        measured = sorted(n for n, cell in row.items() if len(cell.times) >= self._min_samples)
        place = bisect.bisect_left(measured, bucket(num_nodes))
        around = measured[place : place + 1]
        if around != [bucket(num_nodes)]:
            around += measured[max(place - 1, 0) : place]
        recent = [
            row[nodes].high()
            for nodes in around
            if self.num_recorded - row[nodes].recorded_at < self._stale_after
        ]
        return max([estimate, *recent])

    def _curve(self, num_sequences: int) -> list[tuple[int, float]]:
        """(nodes, time) of the measured cells, ascending in both."""
        key = self._nearest(bucket(num_sequences))
        curve = self._curves.get(key)
        if curve is None:
            measured = [
                (nodes, cell.median(), cell.weight())
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


def _monotone(points: list[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """The non-decreasing curve nearest to (nodes, time, weight)."""
    times_s = isotonic([time_s for _, time_s, _ in points], [weight for *_, weight in points])
    return [(point[0], time_s) for point, time_s in zip(points, times_s, strict=True)]
