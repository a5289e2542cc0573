"""How many draft nodes a step verifies, and which: the count with the best goodput.

    goodput(n) = (W + cum[n]) / T_v(B, n)

W: sum of the sequences' weights; cum[n]: the n greatest weighted survivals of the batch.  n = 0,
plain decoding, is always a candidate.  One rule covers adaptive draft length, per-task fallback
and switching speculation off under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenArray
from cluster.spec.step_times import EDGES, StepTimes, bucket

# While a batch size is unmeasured: plain steps at first, and later every sixteenth.
_PLAIN_INTERVAL = 16


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDraft:
    """What one sequence of the batch offers.

    survival: float32[n], calibrated, not increasing along a path (`tree.monotone`); parents stand
    before children.  weight: of its service class.  max_nodes: its own cap.
    """

    survival: FloatArray
    weight: float = 1.0
    max_nodes: int | None = None


@dataclass(slots=True)
class _Mode:
    """What the controller remembers per bucket of sequences.

    num_unmeasured: choices made while plain steps of so many sequences were not measured.
    """

    speculating: bool = False
    num_chosen: int = 0
    num_unmeasured: int = 0


class BudgetController:
    """Chooses draft nodes for each step and learns what steps cost.

    max_draft_tokens: cap per sequence and step.  max_step_nodes: cap of the whole step.
    hysteresis: relative gain that plain decoding must be beaten by before speculation (re)starts.
    probe_interval: steps after which a stale measurement is refreshed, per bucket of sequences.
    first_nodes: draft nodes per sequence of the first speculative step.
    There is no clock and no randomness in it: equal calls give equal answers.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        max_step_nodes: int = EDGES[-1],
        hysteresis: float = 0.03,
        probe_interval: int = 128,
        first_nodes: int = 4,
    ) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._max_step_nodes = max_step_nodes
        self._hysteresis = hysteresis
        self._probe_interval = probe_interval
        self._first_nodes = first_nodes
        self._times = StepTimes(stale_after=probe_interval // 2)
        self._modes: dict[int, _Mode] = {}

    def record(self, num_sequences: int, num_nodes: int, step_time_s: float) -> None:
        """What a step took, in seconds; leave out steps that held prefill rows."""
        if num_sequences > 0 and step_time_s > 0.0:
            self._times.record(num_sequences, num_nodes, step_time_s)

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        """T_v(B, N) in seconds as it is believed at present; None while unmeasured."""
        return self._times.estimate(num_sequences, num_nodes)

    def choose(self, batch: Sequence[SequenceDraft]) -> list[TokenArray]:
        """For each sequence the nodes to verify: ascending indices, closed under parents."""
        owners, nodes, gains = self._ranked(batch)
        num_nodes = self._num_nodes(batch, gains)
        owners, nodes = owners[:num_nodes], nodes[:num_nodes]
        return [np.sort(nodes[owners == index]).astype(np.int32) for index in range(len(batch))]

    def _ranked(
        self, batch: Sequence[SequenceDraft]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """All admissible nodes, best first: (sequence, node, weighted survival).

        Sorting is stable and a parent is never worth less than its child and stands before it, so
        every prefix of the ranking is closed under parents.
        """
        owners: list[npt.NDArray[np.int64]] = []
        nodes: list[npt.NDArray[np.int64]] = []
        gains: list[npt.NDArray[np.float64]] = []
        for index, draft in enumerate(batch):
            cap = self._max_draft_tokens
            if draft.max_nodes is not None:
                cap = min(cap, draft.max_nodes)
            values = np.nan_to_num(draft.survival.astype(np.float64), nan=0.0)
            order = np.argsort(-values, kind="stable")[: max(cap, 0)]
            order = order[values[order] > 0.0]
            owners.append(np.full(len(order), index, dtype=np.int64))
            nodes.append(order)
            gains.append(values[order] * draft.weight)
        if not batch:
            empty = np.zeros(0, dtype=np.int64)
            return empty, empty, np.zeros(0)
        flat = np.concatenate(gains)
        ranking = np.argsort(-flat, kind="stable")[: self._max_step_nodes]
        return np.concatenate(owners)[ranking], np.concatenate(nodes)[ranking], flat[ranking]

    def _num_nodes(self, batch: Sequence[SequenceDraft], gains: npt.NDArray[np.float64]) -> int:
        """The number of nodes for this step."""
        num_sequences = len(batch)
        mode = self._modes.setdefault(bucket(num_sequences), _Mode())
        mode.num_chosen += 1
        if len(gains) == 0 or self._must_step_plainly(num_sequences, mode):
            return 0
        tokens = sum(draft.weight for draft in batch)
        goodputs = self._goodputs(num_sequences, tokens, gains)
        best = max(goodputs, key=lambda n: (goodputs[n], -n))
        plain = goodputs[0]
        bar = plain if mode.speculating else plain * (1.0 + self._hysteresis)
        mode.speculating = best > 0 and goodputs[best] > bar
        wanted = best if mode.speculating else 0
        if mode.num_chosen % self._probe_interval == 0:
            return self._probe(num_sequences, wanted, goodputs)
        return wanted

    def _must_step_plainly(self, num_sequences: int, mode: _Mode) -> bool:
        """Whether plain steps come first, so that they get measured.

        Steps beside prefills are never recorded: under a steady stream of prompts a batch size
        may stay unmeasured for long, and goes by its neighbour then, but for a plain step now and
        then.
        """
        if self._times.is_measured(num_sequences, 0):
            return False
        mode.num_unmeasured += 1
        return (
            mode.num_unmeasured <= _PLAIN_INTERVAL
            or mode.num_unmeasured % _PLAIN_INTERVAL == 0
            or self._times.estimate(num_sequences, 0) is None
        )

    def _goodputs(
        self, num_sequences: int, tokens: float, gains: npt.NDArray[np.float64]
    ) -> dict[int, float]:
        """Expected weighted tokens per second by number of nodes.

        Untried counts are admitted up to twice the largest tried one, so that the cost of a step
        is found out in doublings.
        """
        limit = max(2 * self._times.frontier(num_sequences), self._first_nodes * num_sequences)
        limit = min(limit, len(gains))
        counts = [edge for edge in EDGES if edge <= limit]
        if limit == len(gains) and counts[-1] != limit:
            counts.append(limit)
        totals = np.concatenate(([0.0], np.cumsum(gains)))
        goodputs: dict[int, float] = {}
        for count in counts:
            time_s = self._times.estimate(num_sequences, count)
            assert time_s is not None  # plain steps are measured, if of other batches
            goodputs[count] = (tokens + float(totals[count])) / time_s
        return goodputs

    def _probe(self, num_sequences: int, wanted: int, goodputs: dict[int, float]) -> int:
        """Refresh the stalest of what the choice hangs on: plain, the best, and its neighbours."""
        counts = sorted(goodputs)
        best = max(counts[1:] or [0], key=lambda n: goodputs[n])
        place = counts.index(best)
        around = {0, *counts[max(place - 1, 0) : place + 2]}
        stalest = max(sorted(around), key=lambda n: self._times.age(num_sequences, n))
        if self._times.age(num_sequences, stalest) < self._probe_interval // 2:
            return wanted
        return stalest
