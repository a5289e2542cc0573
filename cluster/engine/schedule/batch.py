"""One forward's rows, laid out in numpy: tokens, positions, slots, and who sees whom.

Rows of one sequence are neighbours: first those of the delta (or of a chunk of it), then the new
nodes of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenArray
from cluster.engine.memory.sequence import Sequence
from cluster.engine.taps import TapRows, Taps
from cluster.engine.work import Work
from cluster.records import record
from cluster.spec.tree import ancestor_bits, mask_of_bits

IndexArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@record
class Share:
    """One sequence's rows.

    row_start: its first row in the batch.  num_delta: tokens of the delta among the rows.
    context_len: committed tokens after them; keys below it are the context's.
    slots: int64[key_len], slot by position, nodes behind the context.
    positions: int64[rows], absolute.  node_positions: int64[nodes], those of all nodes, cached
    ones first.  node_bits: of each new node, which nodes it sees, see `ancestor_bits`.
    border, state: see `Sequence`.  next_border: whose matrices the step writes to `spare`; the same
    where it writes none.
    """

    row_start: int
    num_delta: int
    context_len: int
    slots: IndexArray
    positions: IndexArray
    node_positions: IndexArray
    node_bits: SequenceOf[int]
    border: int = 0
    state: int = 0
    next_border: int = 0
    spare: int = 0

    @property
    def node_mask(self) -> BoolArray:
        """`node_bits` as bool[new nodes, nodes]."""
        return mask_of_bits(self.node_bits, len(self.node_positions))

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def key_len(self) -> int:
        return len(self.slots)

    @property
    def row_stop(self) -> int:
        return self.row_start + len(self.positions)

    def key_start(self, window: int | None) -> int:
        """The first key that any row sees; nodes are never left out."""
        if window is None:
            return 0
        return min(max(0, int(self.positions.min()) - window + 1), self.context_len)

    def path_slots(self, length: int) -> IndexArray:
        """int64[rows, length]: the slots of the last tokens that each row sees, its own last; -1
        in the places before a text's beginning."""
        keys = self.positions[: self.num_delta, None] - np.arange(length)[::-1]
        if self.node_bits:
            # Ancestors stand before their descendants, and the whole context before them.
            seen = np.pad(self.node_mask, ((0, 0), (length, 0)), constant_values=True)
            from_last = seen[:, ::-1].cumsum(axis=1)[:, ::-1]
            nodes = np.nonzero(seen & (from_last <= length))[1].reshape(-1, length)
            keys = np.concatenate((keys, self.context_len - length + nodes))
        return np.where(keys < 0, -1, self.slots[np.maximum(keys, 0)])

    def visible(self, window: int | None) -> BoolArray:
        """bool[rows, key_len - key_start]: which keys each row attends to."""
        start = self.key_start(window)
        rows = self.positions[:, None]
        context = np.arange(start, self.context_len)
        mask = np.zeros((self.num_rows, self.key_len - start), dtype=np.bool_)
        mask[:, : len(context)] = context <= rows
        if self.node_bits:
            mask[self.num_delta :, len(context) :] = self.node_mask
        if window is not None:
            mask &= np.concatenate((context, self.node_positions)) > rows - window
        return mask


@record
class Batch:
    """token_ids, positions, slots: int64[rows].  slots: where each row's keys and values go.
    logit_rows: int64[wanted], the rows whose logits are asked for, in the order of the shares.
    taps: wanted of all rows.  adapters: int64[rows], 0 = none; None where no row has one."""

    shares: SequenceOf[Share]
    token_ids: IndexArray
    positions: IndexArray
    slots: IndexArray
    logit_rows: IndexArray
    taps: tuple[int, ...] = ()
    adapters: IndexArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def path_slots(self, length: int) -> IndexArray:
        """Those of the shares' rows; a padding row sees no token."""
        slots = np.full((self.num_rows, length), -1, dtype=np.int64)
        for share in self.shares:
            slots[share.row_start : share.row_stop] = share.path_slots(length)
        return slots

    def at(self, picks: SequenceOf[Pick], group: int, scratch_slot: int) -> Batch:
        """The same rows at their slots in the pool of another group of layers than the first.

        picks: as given to `build_batch`."""
        shares: list[Share] = []
        slots = np.full_like(self.slots, scratch_slot)
        for share, pick in zip(self.shares, picks, strict=True):
            own = pick.sequence.tables[group].slots[: share.key_len]
            shares.append(replace(share, slots=own))
            slots[share.row_start : share.row_stop] = own[share.key_len - share.num_rows :]
        return replace(self, shares=shares, slots=slots)


@dataclass(slots=True, eq=False)
class Pick:
    """The scheduler's choice for one sequence: the `num_delta` tokens of the work that follow
    the cached ones, then all new nodes if it completes the work.

    is_prefill: longer than a decoding step.
    """

    sequence: Sequence
    work: Work
    num_delta: int
    completes: bool
    is_prefill: bool = False
    num_rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = self.num_delta + (self.work.num_new_nodes if self.completes else 0)

    @property
    def num_prompt_rows(self) -> int:
        """Its tokens, unless it is the last one that the cache lacks, as of a text in decoding."""
        return 0 if self.completes and self.num_delta == 1 else self.num_delta

    @property
    def num_logit_rows(self) -> int:
        """A completed work's rows of logits; an unfinished one has none."""
        return self.work.num_logit_rows if self.completes else 0

    def delta(self) -> TokenArray:
        """The tokens of this step's chunk; to be asked before they are committed."""
        start = self.sequence.cached_len - self.work.base_len
        return self.work.delta[start : start + self.num_delta]


def build_batch(
    picks: SequenceOf[Pick],
    *,
    min_rows: int,
    scratch_slot: int,
    max_context_len: int,
    taps: tuple[int, ...] = (),
) -> Batch:
    """Lay out the picks, at their slots in the first group of layers; pages are reserved.

    min_rows: pad to so many rows with token 0 at position 0, which nobody sees: its keys and
    values go to `scratch_slot`, and it belongs to no share.
    """
    shares: list[Share] = []
    token_ids: list[npt.NDArray[np.int32]] = []
    positions: list[IndexArray] = []
    slots: list[IndexArray] = []
    logit_rows: list[int] = []
    row = 0
    for pick in picks:
        share, tokens = _share(pick, row)
        shares.append(share)
        token_ids += tokens
        positions.append(share.positions)
        start = share.key_len - share.num_rows  # new rows take the last positions
        slots.append(share.slots[start:])
        row = share.row_stop
        logit_rows += range(row - pick.num_logit_rows, row)
    if row < min_rows:
        padding = np.zeros(min_rows - row, dtype=np.int64)
        token_ids.append(padding.astype(np.int32))
        positions.append(padding)
        slots.append(np.full_like(padding, scratch_slot))
    return Batch(
        shares,
        np.concatenate(token_ids, dtype=np.int64),
        # A tree may reach beyond the limit, where learned position tables end.  Nothing drawn there
        # is ever emitted, so any position does.
        np.minimum(np.concatenate(positions), max_context_len - 1),
        np.concatenate(slots),
        np.array(logit_rows, np.int64),
        taps,
        _adapters(picks, max(row, min_rows)),
    )


def padding(num_rows: int, scratch_slot: int = 0) -> Batch:
    """A step of nobody."""
    zeros = np.zeros(num_rows, np.int64)
    return Batch((), zeros, zeros, np.full_like(zeros, scratch_slot), zeros[:0])


def tapped(picks: SequenceOf[Pick], rows: torch.Tensor | None) -> Taps | None:
    """The taps with the sequences that they are of; to be asked before the picks are committed.

    rows: [rows, taps, hidden], padding behind those of the picks; None = none were asked for."""
    if rows is None:
        return None
    sequences: list[TapRows] = []
    start = 0
    for pick in picks:
        stop = start + pick.num_rows
        name, position = pick.sequence.request_id, pick.sequence.cached_len
        sequences.append(TapRows(name, position, pick.num_delta, start, stop))
        start = stop
    return Taps(rows[:start], tuple(sequences))


def _adapters(picks: SequenceOf[Pick], num_rows: int) -> IndexArray | None:
    if not any(pick.work.adapter for pick in picks):
        return None
    adapters = np.zeros(num_rows, dtype=np.int64)
    used = np.repeat([pick.work.adapter for pick in picks], [pick.num_rows for pick in picks])
    adapters[: len(used)] = used
    return adapters


def _share(pick: Pick, row_start: int) -> tuple[Share, SequenceOf[TokenArray]]:
    sequence, work = pick.sequence, pick.work
    start, border, spare = sequence.cached_len, sequence.border, sequence.spare
    context_len = start + pick.num_delta
    has_nodes = pick.completes and len(work.tree) > 0
    bits = ancestor_bits(work.tree.parents) if has_nodes else []
    positions = np.arange(start, context_len)
    if has_nodes:
        of_nodes = (context_len - 1 + each.bit_count() for each in bits)
        positions = np.array([*range(start, context_len), *of_nodes])
    first_new = work.num_cached_nodes  # 0 where there is a delta
    share = Share(
        row_start,
        pick.num_delta,
        context_len,
        sequence.tables[0].slots[: context_len + len(bits)],
        positions[first_new:],
        positions[pick.num_delta :],
        bits[first_new:],
        border,
        sequence.state,
        sequence.border_in(context_len) if spare else border,
        spare,
    )
    return share, (pick.delta(), work.tree.token_ids[first_new : len(bits)])
