"""The rows of a step for layers that keep a matrix of all tokens before, in the order that they
follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from cluster.engine.schedule.batch import Batch, Share
from cluster.records import record
from cluster.spec.transfer import sent

# Tokens whose mutual products are made at once, as many as transformers takes: a prompt's time
# grows with their number, that of all but the last piece with 1 / number.
_LONGEST = 64
# A text, and three places in it: where the part begins, its first row, and where it ends.
_Part = tuple[Share, int, int, int]


@record
class Piece:
    """Some rows of some texts, padded to equal numbers.

    states: int64[texts], where the matrix lies that they begin with.  past: int64[texts, past], the
    slots of tokens behind it that have been computed.  rows: int64[texts, rows], of the step; one
    more than its last = of nobody.  slots: int64[texts, rows], where they are written.  seen:
    bool[texts, rows + 1, past + rows], who sees whom; all that are of the text, in the last.
    borders: int64[texts], where the matrix behind them all is to lie; None = it is not kept.
    """

    states: torch.Tensor
    past: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    seen: torch.Tensor
    borders: torch.Tensor | None = None

    def to(self, device: torch.device) -> Piece:
        fields = [self.states, self.past, self.rows, self.slots, self.seen]
        if self.borders is not None:
            fields.append(self.borders)
        return Piece(*(each.to(device) for each in fields))


def pieces_of(batch: Batch, scratch_slot: int, device: torch.device) -> list[Piece]:
    """batch: at the slots of the layers' group.

    Each text is cut at the border whose state is to be kept, and what leads there further.  Texts
    run side by side where they have about as many rows."""
    groups: dict[tuple[int, bool, int], list[_Part]] = {}
    for share in batch.shares:
        cuts = [*range(share.border, share.next_border, _LONGEST), share.next_border, share.key_len]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            first = min(max(start, share.key_len - share.num_rows), stop)
            key = number, start == share.next_border, (stop - first).bit_length()
            groups.setdefault(key, []).append((share, start, first, stop))
    return [_padded(groups[key], batch, scratch_slot, device) for key in sorted(groups)]


def _padded(parts: Sequence[_Part], batch: Batch, scratch_slot: int, device: torch.device) -> Piece:
    num_past = max(first - start for _, start, first, _ in parts)
    num_rows = max(stop - first for _, _, first, stop in parts)
    past = np.full((len(parts), num_past), scratch_slot)
    rows = np.full((len(parts), num_rows), batch.num_rows)
    seen = np.zeros((len(parts), num_rows + 1, num_past + num_rows), np.bool_)
    for text, (share, start, first, stop) in enumerate(parts):
        own, old, new = np.arange(first, stop), first - start, stop - first
        past[text, :old] = share.slots[start:first]
        rows[text, :new] = own - share.key_len + share.row_stop
        sees = np.arange(start, stop) <= own[:, None]
        if start == share.next_border and len(share.node_mask):
            sees[-len(share.node_mask) :, share.context_len - start :] = share.node_mask
        columns = np.r_[:old, num_past : num_past + new]
        seen[text, :new][:, columns] = sees
        seen[text, -1, columns] = True
    slots = np.append(batch.slots, scratch_slot)[rows]
    places = [share.state if start == share.border else share.spare for share, start, _, _ in parts]
    fields = [np.array(places), past, rows, slots, seen]
    share, start, _, _ = parts[0]
    if start < share.next_border:
        fields.append(np.array([share.spare for share, _, _, _ in parts]))
    return Piece(*(sent(each, device) for each in fields))
