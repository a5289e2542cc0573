"""What a round takes: measured times of target steps and of drafting, by sequences and nodes."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.spec.forest import Floats
from cluster.spec.isotonic import isotonic
from cluster.spec.step_profile import StepProfile

# Steps between neighbours are at most a half; kernels' staircases lie at such sizes.
EDGES: tuple[int, ...] = (
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
)  # fmt: skip
NODE_EDGES = np.array(EDGES)
# Of a sequence: what residents may be asked for, and for which it is known what was accepted.
DRAFT_LENGTHS = NODE_EDGES[(NODE_EDGES >= 1) & (NODE_EDGES <= 32)]
# No step commits more tokens of a text: a model that lacks more of it reads it before it drafts,
# which says nothing of what drafting takes.
MAX_COMMIT = int(DRAFT_LENGTHS[-1]) + 1

# A median of so many ignores stray slow steps, and follows a change of load within five.
_NUM_SAMPLES = 9
# A cell's own samples count so many times as much as those of the next one.
_NEIGHBOUR = 32.0
# Steps after which what was measured counts half: long enough to outlast the rare plain steps.
_HALF_LIFE = 512
# Rows at which computing costs as much as reading the weights, of a target that says nothing.
_KNEE_ROWS = 32.0
# Nodes that take as long as drafting at all: on two cores SmolLM2's residents take 3.6 ms for 1
# node and 4.5 ms for 16.
_DRAFT_BASE = 16.0

# Seconds, on any scale, at all of EDGES for so many sequences: what is not measured follows it.
Shape = Callable[[int], Floats]

# By count up to the last edge, where the smallest edge stands that is not below it.
_PLACES = tuple(bisect.bisect_left(EDGES, count) for count in range(EDGES[-1] + 1))


def place(count: int) -> int:
    """Where the smallest edge stands that is not below `count`."""
    return _PLACES[count] if count < len(_PLACES) else len(EDGES) - 1


def bucket(count: int) -> int:
    """The smallest edge that is not below `count`; what lies beyond the last edge is the last."""
    return EDGES[place(count)]


def step_shape(profile: StepProfile | None) -> Shape:
    """How a step's time grows with its rows: as the target has profiled it, if it has."""

    def of_rows(num_sequences: int) -> Floats:
        rows = num_sequences + NODE_EDGES
        return 1.0 + rows / _KNEE_ROWS if profile is None else profile.at(rows)

    return of_rows


def draft_shape(num_sequences: int) -> Floats:
    """How drafting grows, until it is measured: what it takes at all, and the nodes."""
    per_node = 1.0 + num_sequences / _KNEE_ROWS
    return np.where(NODE_EDGES > 0, per_node * (_DRAFT_BASE + NODE_EDGES), 0.0)


@dataclass(slots=True)
class _Cell:
    """ratios: of measured times to the shape."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    recorded_at: int = 0


class CostTable:
    """Seconds by number of sequences and of nodes, each known at EDGES.

    A time that is not measured is that of the shape, scaled as those measured nearby differ from
    it; so a few samples tell the whole staircase, and each cell its own step.
    """

    def __init__(self, shape: Shape, *, is_in_seconds: bool = False) -> None:
        """is_in_seconds: the shape may be believed where nothing is measured at all."""
        self._shape = shape
        self._is_in_seconds = is_in_seconds
        self._cells: dict[tuple[int, int], _Cell] = {}  # by places in EDGES
        self._known: dict[int, Floats | None] = {}  # answers until the next `record`
        self.num_recorded = 0

    def record(self, num_sequences: int, num_nodes: int, time_s: float) -> None:
        """One round took so long."""
        cell = self._cells.setdefault((place(num_sequences), place(num_nodes)), _Cell())
        usual = float(np.interp(num_nodes, NODE_EDGES, self._shape(num_sequences)))
        cell.ratios.append(time_s / usual)
        self.num_recorded += 1
        cell.recorded_at = self.num_recorded
        self._known.clear()

    def at_edges(self, num_sequences: int, num_others: int = 0) -> Floats | None:
        """Seconds for each number of nodes in EDGES, ascending; None while nothing is known.

        num_others: rows beside them, of prompts.
        """
        if num_sequences not in self._known:
            self._known[num_sequences] = self._at_edges(num_sequences)
        known = self._known[num_sequences]
        if known is None or not num_others:
            return known
        speed = known[0] / self._shape(num_sequences)[0]
        return np.asarray(speed * self._shape(num_sequences + num_others))

    def of_lengths(self, num_sequences: int) -> Floats | None:
        """Seconds for each of DRAFT_LENGTHS; None while nothing is known."""
        times_s = self.at_edges(num_sequences)
        return None if times_s is None else np.interp(DRAFT_LENGTHS, NODE_EDGES, times_s)

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        times_s = self.at_edges(num_sequences)
        if times_s is None:
            return None
        return float(np.interp(num_nodes, NODE_EDGES, times_s))

    def age(self, num_sequences: int, num_nodes: int) -> int:
        """Rounds recorded since the last one of this size; all of them when there was none."""
        cell = self._cells.get((place(num_sequences), place(num_nodes)))
        return self.num_recorded - (cell.recorded_at if cell is not None else 0)

    def export(self) -> list[list[Any]]:
        """What was measured, as plain values."""
        return [[row, column, list(cell.ratios)] for (row, column), cell in self._cells.items()]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Go on from what `export` gave; ValueError where it is of another form."""
        for row, column, ratios in state:
            if not all(0 <= each < len(EDGES) for each in (row, column)):
                raise ValueError("step costs of another form")
            if not ratios or not all(0.0 < ratio < math.inf for ratio in ratios):
                raise ValueError("step costs that are no times")
            self._cells[row, column] = _Cell(deque(ratios, maxlen=_NUM_SAMPLES))
        self._known.clear()

    def _at_edges(self, num_sequences: int) -> Floats | None:
        shape = self._shape(num_sequences)
        if not self._cells:
            return shape if self._is_in_seconds else None
        cells = self._cells.values()
        rows, columns = np.array(list(self._cells)).T
        ratios = np.array([statistics.median(cell.ratios) for cell in cells])
        weights = np.array([
            len(cell.ratios) * 0.5 ** ((self.num_recorded - cell.recorded_at) / _HALF_LIFE)
            for cell in cells
        ])  # fmt: skip
        away = np.abs(np.arange(len(EDGES))[:, np.newaxis] - columns)
        away = away + np.abs(rows - place(num_sequences))
        weights = weights * _NEIGHBOUR ** -away.astype(np.float64)
        evidence = weights.sum(axis=1)
        found = shape * (weights @ ratios) / evidence
        # More nodes never take less: where measured times say so, the better known ones count more.
        return np.array(isotonic(found.tolist(), evidence.tolist()))
