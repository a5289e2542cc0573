"""What an EAGLE head keeps of a text, in layers of its own on the pages of the target's KV cache.

In the slot of position p lie the target's fused hidden row of p, and the head's key and value of
its row for p: that of token p and of the hidden row before it.  So all of it is there wherever the
target's own keys are: after prefix hits, chunks, preemptions and accepted paths, with no state by
request.  A stamp of token and position tells rows that were written from those that were not, or
for another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig

from cluster.core import TokenArray
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.mtp import MtpHead
from cluster.draft.heads.peagle import ParallelHead
from cluster.draft.inside import Host, IndexArray, StepRows, own_caches
from cluster.engine.types import LayerSpec

# Stamps are numbers that every floating-point format holds exactly; 0 is what nobody wrote.
_NUM_STAMPS = 255


def layers(layer: LlamaConfig, like: LayerSpec, num_layers: int = 1) -> list[LayerSpec]:
    """The head's keys and values; hidden rows, one half as key, one as value; stamps."""
    half = (layer.hidden_size + 1) // 2
    own = (layer.num_key_value_heads, layer.head_dim)
    shapes = (*[own] * num_layers, (1, half), (1, 1))
    return [LayerSpec(heads, dim, like.dtype, like.device) for heads, dim in shapes]


@dataclass(frozen=True, slots=True, eq=False)
class HeadContext:
    """What a head's rows behind a text attend to, and what the first of them takes.

    layers: keys and values of each, [rows, kv_heads, head_dim].  hidden: [hidden], of the last
    token that has a row.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where rows of a text belong: int64[rows] each.  before: slot of the token before the first,
    None at the beginning of the text."""

    request_id: str
    token_ids: IndexArray
    positions: IndexArray
    slots: IndexArray
    before: int | None


class HeadCache:
    """Writes what steps computed, and reads what a text's drafts start from."""

    def __init__(self, host: Host, head: Eagle3Head | MtpHead, dtype: torch.dtype) -> None:
        """dtype: that the head computes in."""
        self._host = host
        self._head = head
        self._dtype = dtype
        self._hidden_size = head.spec.layer.hidden_size
        *self._layers, self._hidden, self._stamps = own_caches(host)

    def write(self, rows: Sequence[StepRows]) -> None:
        """Keep the rows of texts that a step computed."""
        taps = [
            each.taps[torch.from_numpy(each.text_rows).to(each.taps.device)]
            for each in rows
            if each.taps is not None
        ]
        places = [self._places(each) for each in rows if each.taps is not None]
        if not places:
            return
        fused = self._head.fuse(torch.cat(taps).flatten(1).to(self._dtype))
        parts = torch.split(fused, [len(each.slots) for each in places])
        before = torch.cat(
            [
                torch.cat((self._before(place, own), own[:-1]))
                for place, own in zip(places, parts, strict=True)
            ]
        )
        token_ids = np.concatenate([each.token_ids for each in places])
        positions = np.concatenate([each.positions for each in places])
        slots = self._index(np.concatenate([each.slots for each in places]))
        found = self._keys_values(
            places, self._index(token_ids), before, self._index(np.maximum(positions - 1, 0))
        )
        half = self._hidden.shape[-1]
        halves = torch.nn.functional.pad(fused, (0, 2 * half - self._hidden_size))
        self._hidden[slots] = halves.view(-1, 2, 1, half).to(self._hidden.dtype)
        for layer, (keys, values) in zip(self._layers, found, strict=True):
            layer[slots] = torch.stack((keys, values), dim=1).to(layer.dtype)
        stamps = torch.from_numpy(stamps_of(token_ids, positions)).to(self._stamps)
        self._stamps[slots] = stamps.view(-1, 2, 1, 1)

    def _keys_values(
        self, places: Sequence[Places], token_ids: torch.Tensor, hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Those of the head's layers, of the rows of all places."""
        return [self._head.keys_values(token_ids, hidden, positions)]

    def _places(self, rows: StepRows) -> Places:
        token_ids = rows.token_ids[rows.text_rows].astype(np.int64)
        first, stop = rows.first_position, rows.first_position + len(token_ids)
        slots = self._host.slots(rows.request_id)
        assert len(slots) >= stop, "the target holds what its step computed"
        before = int(slots[first - 1]) if first else None
        return Places(rows.request_id, token_ids, np.arange(first, stop), slots[first:stop], before)

    def _before(self, place: Places, own: torch.Tensor) -> torch.Tensor:
        """The hidden row before the first: [1, hidden]; any for the text's first token."""
        return own[:1] if place.before is None else self._read_hidden(np.array([place.before]))

    def read(self, request_id: str, token_ids: TokenArray, context: int) -> HeadContext | None:
        """What drafts behind a text start from; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  context: of how many tokens
        before that at most.  What is missing further up is left out.
        """
        length = len(token_ids) - 1
        slots = self._host.slots(request_id)
        if length < 1 or len(slots) != length:
            return None
        first = max(1, length - context)  # the first token has no key: no hidden row is before it
        positions = np.arange(min(first, length - 1), length)
        is_there = self._is_there(slots, token_ids, positions)
        if not is_there[-1]:
            return None
        is_there[positions < first] = False
        held = self._held(slots[positions[is_there]])
        return HeadContext(held, self._read_hidden(slots[-1:])[0])

    def _is_there(
        self, slots: IndexArray, token_ids: TokenArray, positions: IndexArray
    ) -> npt.NDArray[np.bool_]:
        """Whether the rows at these positions of a text were written for it."""
        stamps = self._stamps[self._index(slots[positions]), :, 0, 0].float().cpu().numpy()
        expected = stamps_of(token_ids[positions], positions)
        found: npt.NDArray[np.bool_] = np.all(stamps == expected, axis=1)
        return found

    def _held(self, slots: IndexArray) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values of each layer in these slots."""
        where = self._index(slots)
        rows = [layer[where].to(self._dtype) for layer in self._layers]
        return tuple((each[:, 0], each[:, 1]) for each in rows)

    def _read_hidden(self, slots: IndexArray) -> torch.Tensor:
        """[rows, hidden]."""
        rows = self._hidden[self._index(slots)].flatten(1)
        return rows[:, : self._hidden_size].to(self._dtype)

    def _index(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._stamps.device)


def stamps_of(token_ids: TokenArray | IndexArray, positions: IndexArray) -> IndexArray:
    """int64[rows, 2]."""
    ids = token_ids.astype(np.int64)
    first, second = ids + 7 * positions, ids // _NUM_STAMPS + positions // _NUM_STAMPS
    return np.stack((first, second), axis=1) % _NUM_STAMPS + 1


class ParallelCache(HeadCache):
    """The same for a head of several layers, whose rows attend to those before them."""

    def __init__(self, host: Host, head: ParallelHead, dtype: torch.dtype, context: int) -> None:
        """context: tokens before a row that it attends to at most."""
        super().__init__(host, head, dtype)
        self._parallel = head
        self._context = context

    def _keys_values(
        self, places: Sequence[Places], token_ids: torch.Tensor, hidden: torch.Tensor,
        positions: torch.Tensor,
    ) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        sizes = [len(each.slots) for each in places]
        pasts = [self._past(each) for each in places] if self._parallel.num_layers > 1 else []

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            parts = zip(*(torch.split(each, sizes) for each in (query, key, value)), strict=True)
            found = [
                attended(past.layers[layer], past.is_seen, *part)
                for past, part in zip(pasts, parts, strict=True)
            ]
            return torch.cat(found)

        return self._parallel.layers_keys_values(token_ids, hidden, positions, attend)

    def _past(self, places: Places) -> _Past:
        first = int(places.positions[0])
        slots = self._host.slots(places.request_id)
        positions = np.arange(max(1, first - self._context), max(1, first))
        is_there = self._is_there(slots, self._host.token_ids(places.request_id), positions)
        positions = positions[is_there]
        keys, rows = np.concatenate((positions, places.positions)), places.positions[:, None]
        is_seen = (keys >= 1) & (keys <= rows) & (keys >= rows - self._context)
        # The text's first token has no row; it sees itself, so that it sees something.
        is_seen |= keys == rows
        return _Past(
            self._held(slots[positions]), torch.from_numpy(is_seen).to(self._stamps.device)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Past:
    """layers: as in `HeadContext`.  is_seen: bool[rows, past and rows], by whom."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    is_seen: torch.Tensor


def attended(
    past: tuple[torch.Tensor, torch.Tensor], is_seen: torch.Tensor, query: torch.Tensor,
    key: torch.Tensor, value: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Rows of one text over what is held of it and each other: [rows, heads, dim].

    is_seen: bool[rows, past and rows]."""
    found = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        torch.cat((past[0], key)).transpose(0, 1)[None],
        torch.cat((past[1], value)).transpose(0, 1)[None],
        attn_mask=is_seen,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1)
