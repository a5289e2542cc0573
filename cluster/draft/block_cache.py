"""What a block drafter keeps of a text, in layers of its own on the pages of the target's KV cache.

In the slot of a position lie the keys and values, of each of its layers, of the target's fused
hidden row there.  They depend on that row alone, so they are right wherever the target's own keys
are; a stamp of token and position tells those that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cluster.core import TokenArray
from cluster.draft.head_cache import stamps_of
from cluster.draft.heads.block import BlockHead
from cluster.draft.inside import Host, IndexArray, StepRows, own_caches
from cluster.engine.types import LayerSpec


def layers(num_layers: int, kv_heads: int, head_dim: int, like: LayerSpec) -> list[LayerSpec]:
    """The keys and values of each layer; stamps."""
    shapes = [(kv_heads, head_dim)] * num_layers + [(1, 1)]
    return [LayerSpec(heads, dim, like.dtype, like.device) for heads, dim in shapes]


@dataclass(frozen=True, slots=True, eq=False)
class BlockContext:
    """What a block behind a text attends to.

    positions: int64[rows].  layers: keys and values of each, [rows, kv heads, dim].
    """

    positions: torch.Tensor
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class BlockCache:
    """Writes what steps computed, and reads what a text's blocks attend to."""

    def __init__(self, host: Host, head: BlockHead, dtype: torch.dtype) -> None:
        """dtype: that the drafter computes in."""
        self._host = host
        self._head = head
        self._dtype = dtype
        *self._layers, self._stamps = own_caches(host)

    def write(self, rows: Sequence[StepRows]) -> None:
        """Keep the rows of texts that a step computed."""
        taps, slots, ids, positions = [], [], [], []
        for each in rows:
            if each.taps is None:
                continue
            own = each.text_rows
            first, stop = each.first_position, each.first_position + len(own)
            taps.append(each.taps[torch.from_numpy(own).to(each.taps.device)])
            slots.append(self._host.slots(each.request_id)[first:stop])
            ids.append(each.token_ids[own])
            positions.append(np.arange(first, stop))
        if not taps:
            return
        fused = self._head.fuse(torch.cat(taps).flatten(1).to(self._dtype))
        where, places = self._index(np.concatenate(slots)), np.concatenate(positions)
        found = self._head.keys_values(fused, self._index(places))
        for layer, (keys, values) in zip(self._layers, found, strict=True):
            layer[where] = torch.stack((keys, values), dim=1).to(layer.dtype)
        written = torch.from_numpy(stamps_of(np.concatenate(ids), places)).to(self._stamps)
        self._stamps[where] = written.view(-1, 2, 1, 1)

    def read(self, request_id: str, token_ids: TokenArray, context: int) -> BlockContext | None:
        """What a block behind a text attends to; None where the last row is missing.

        token_ids: the text, of which the last token has no row yet.  context: of how many tokens
        before that at most.  What is missing further up is left out.
        """
        length = len(token_ids) - 1
        slots = self._host.slots(request_id)
        if length < 1 or len(slots) != length:
            return None
        positions = np.arange(max(0, length - context), length)
        where = self._index(slots[positions])
        held = self._stamps[where, :, 0, 0].float().cpu().numpy()
        is_there = (held == stamps_of(token_ids[positions], positions)).all(axis=1)
        if not is_there[-1]:
            return None
        where = self._index(slots[positions[is_there]])
        found = [layer[where].to(self._dtype) for layer in self._layers]
        return BlockContext(
            self._index(positions[is_there]), tuple((each[:, 0], each[:, 1]) for each in found)
        )

    def _index(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._stamps.device)
