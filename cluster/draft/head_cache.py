"""The cache of EAGLE heads: beside keys and values, the target's fused hidden rows.

In the slot of position p lie that row of p, and the head's key and value of its row for p: that of
token p and of the hidden row before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig

from cluster.core import TokenArray
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.mtp import MtpHead
from cluster.draft.inside import Host, IndexArray, StepRows
from cluster.draft.text_cache import Places, TextCache, TextContext, layers_like
from cluster.engine.types import LayerSpec


def layers(layer: LlamaConfig, like: LayerSpec, num_layers: int = 1) -> list[LayerSpec]:
    """The head's keys and values; hidden rows, one half as key, one as value; stamps."""
    half = (layer.hidden_size + 1) // 2
    own = (layer.num_key_value_heads, layer.head_dim)
    return layers_like(like, [*[own] * num_layers, (1, half)])


@dataclass(frozen=True, slots=True, eq=False)
class HeadContext(TextContext):
    """And what the first row behind a text takes: [hidden], of the last token that has a row."""

    hidden: torch.Tensor


class HeadCache(TextCache):
    """Writes what steps computed, and reads what a text's drafts start from."""

    def __init__(
        self, host: Host, head: Eagle3Head | MtpHead, dtype: torch.dtype, context: int
    ) -> None:
        """dtype: that the head computes in.  context: tokens before a row that it attends to at
        most."""
        super().__init__(host, dtype, head.num_layers)
        self._head = head
        self._context_len = context
        self._hidden_size = head.spec.layer.hidden_size
        self._hidden = host.caches[head.num_layers]

    def write(self, rows: Sequence[StepRows]) -> None:
        """See `TextCache`."""
        places, taps = self._rows_of(rows)
        if not places:
            return
        fused = self._head.fuse(taps)
        parts = torch.split(fused, [len(each.slots) for each in places])
        before = torch.cat(
            [
                torch.cat((self._before(place, own), own[:-1]))
                for place, own in zip(places, parts, strict=True)
            ]
        )
        token_ids = np.concatenate([each.token_ids for each in places])
        positions = np.concatenate([each.positions for each in places])
        attending = [self._part(each) for each in places] if self._head.num_layers > 1 else []
        found = self._head.keys_values(
            self._index(token_ids), before, self._index(np.maximum(positions - 1, 0)),
            SpanAttention(attending),
        )  # fmt: skip
        slots, half = self._keep(places, found), self._hidden.shape[-1]
        halves = torch.nn.functional.pad(fused, (0, 2 * half - self._hidden_size))
        self._hidden[slots] = halves.view(-1, 2, 1, half).to(self._hidden.dtype)

    def _part(self, places: Places) -> Part:
        """A text's rows, which attend to those before them."""
        first = int(places.positions[0])
        slots = self._host.slots(places.request_id)
        positions = np.arange(max(1, first - self._context_len), max(1, first))
        is_there = self._is_there(slots, self._host.token_ids(places.request_id), positions)
        positions = positions[is_there]
        keys, rows = np.concatenate((positions, places.positions)), places.positions[:, None]
        is_seen = (keys >= 1) & (keys <= rows) & (keys >= rows - self._context_len)
        # The text's first token has no row; it sees itself, so that it sees something.
        is_seen |= keys == rows
        mask = torch.from_numpy(is_seen).to(self._stamps.device)
        return Part(Span(self._held(slots[positions])), len(rows), [mask] * self._head.num_layers)

    def _before(self, place: Places, own: torch.Tensor) -> torch.Tensor:
        """The hidden row before the first: [1, hidden]; any for the text's first token."""
        return own[:1] if place.before is None else self._read_hidden(np.array([place.before]))

    def read(
        self, request_id: str, token_ids: TokenArray, context: int | None = None
    ) -> HeadContext | None:
        """The start of drafts behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  context: of how many tokens
        before that at most; None = as many as a row attends to.
        """
        # The first token has no key: no hidden row is before it.
        found = self._context(request_id, token_ids, context or self._context_len, first=1)
        if found is None:
            return None
        hidden = self._read_hidden(self._host.slots(request_id)[-1:])[0]
        return HeadContext(found.positions, found.layers, hidden)

    def _read_hidden(self, slots: IndexArray) -> torch.Tensor:
        """[rows, hidden]."""
        rows = self._hidden[self._index(slots)].flatten(1)
        return rows[:, : self._hidden_size].to(self._dtype)
