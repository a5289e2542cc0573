"""The cache of drafters inside the target, in layers of their own on the pages of its KV cache.

In the slot of a position lie the keys and values that rows behind it attend to, of each of the
drafter's layers.  So they are there wherever the target's own keys are: after prefix hits, chunks,
preemptions and accepted paths, with no state by request.  A stamp of token and position tells rows
that were written from those that were not, or for another text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig

from cluster.core import TokenArray
from cluster.draft.head_attention import Part, Span, SpanAttention
from cluster.draft.heads.block import BlockHead
from cluster.draft.heads.eagle3 import Eagle3Head
from cluster.draft.heads.layers import KeysValues
from cluster.draft.heads.mtp import MtpHead
from cluster.draft.inside import Host, IndexArray, StepRows, own_caches
from cluster.engine.types import LayerSpec

# Stamps are numbers that every floating-point format holds exactly; 0 is what nobody wrote.
_NUM_STAMPS = 255


def layers_like(like: LayerSpec, shapes: Sequence[tuple[int, int]]) -> list[LayerSpec]:
    """Layers of these (heads, dim) beside the target's, and last the stamps."""
    return [LayerSpec(heads, dim, like.dtype, like.device) for heads, dim in (*shapes, (1, 1))]


@dataclass(frozen=True, slots=True, eq=False)
class TextContext:
    """Keys and values for rows behind a text.

    positions: int64[rows], those that are held.  layers: of each, keys and values.
    """

    positions: IndexArray
    layers: tuple[KeysValues, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where a step's rows of one text belong: int64[rows] each.  before: slot of the token before
    the first, None at the beginning of the text."""

    request_id: str
    token_ids: IndexArray
    positions: IndexArray
    slots: IndexArray
    before: int | None


class TextCache(ABC):
    """Keys, values and stamps by slot."""

    def __init__(self, host: Host, dtype: torch.dtype, num_layers: int, context: int) -> None:
        """dtype: that the drafter computes in.  num_layers: with keys and values.  context: tokens
        before a row that it attends to at most."""
        self._host = host
        self._context_len = context
        self._dtype = dtype
        self._layers = own_caches(host)[:num_layers]

    @cached_property
    def _stamps(self) -> torch.Tensor:
        """Cleared at the first use, in the engine's thread: what a head wrote whose place this one
        takes says nothing to it."""
        return self._host.caches[-1].zero_()

    @abstractmethod
    def write(self, rows: Sequence[StepRows]) -> None:
        """Keep the rows of texts that a step computed."""

    def _rows_of(self, rows: Sequence[StepRows]) -> tuple[list[Places], torch.Tensor]:
        """The rows of texts that have taps: where they belong, and the taps side by side."""
        tapped = [(each, each.taps) for each in rows if each.taps is not None]
        taps = [each[torch.from_numpy(of.text_rows).to(each.device)] for of, each in tapped]
        side_by_side = torch.cat(taps).flatten(1).to(self._dtype) if taps else torch.empty(0)
        return [self._places(each) for each, _ in tapped], side_by_side

    def _places(self, rows: StepRows) -> Places:
        token_ids = rows.token_ids[rows.text_rows].astype(np.int64)
        first, stop = rows.first_position, rows.first_position + len(token_ids)
        slots = self._host.slots(rows.request_id)
        assert len(slots) >= stop, "the target holds what its step computed"
        before = int(slots[first - 1]) if first else None
        return Places(rows.request_id, token_ids, np.arange(first, stop), slots[first:stop], before)

    def _keep(self, places: Sequence[Places], found: Sequence[KeysValues]) -> torch.Tensor:
        """Write the keys and values of each layer; returns the rows' slots."""
        token_ids, positions, slots = (
            np.concatenate([getattr(each, name) for each in places])
            for name in ("token_ids", "positions", "slots")
        )
        where = self._index(slots)
        for layer, (keys, values) in zip(self._layers, found, strict=True):
            layer[where] = torch.stack((keys, values), dim=1).to(layer.dtype)
        stamps = torch.from_numpy(_stamps_of(token_ids, positions)).to(self._stamps)
        self._stamps[where] = stamps.view(-1, 2, 1, 1)
        return where

    def _context(self, request_id: str, token_ids: TokenArray, first: int) -> TextContext | None:
        """Keys and values for rows behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  first: the first position that
        has keys.  What is missing further up is left out.
        """
        length = len(token_ids) - 1
        slots = self._host.slots(request_id)
        if length < 1 or len(slots) != length:
            return None
        first = max(first, length - self._context_len)
        positions = np.arange(min(first, length - 1), length)
        is_there = self._is_there(slots, token_ids, positions)
        if not is_there[-1]:
            return None
        positions = positions[is_there & (positions >= first)]
        return TextContext(positions, self._held(slots[positions]))

    def _is_there(
        self, slots: IndexArray, token_ids: TokenArray, positions: IndexArray
    ) -> npt.NDArray[np.bool_]:
        """Of each of these positions of a text, True if its row was written for it."""
        stamps = self._stamps[self._index(slots[positions]), :, 0, 0].float().cpu().numpy()
        expected = _stamps_of(token_ids[positions], positions)
        found: npt.NDArray[np.bool_] = np.all(stamps == expected, axis=1)
        return found

    def _held(self, slots: IndexArray) -> tuple[KeysValues, ...]:
        """Keys and values of each layer in these slots."""
        where = self._index(slots)
        rows = [layer[where].to(self._dtype) for layer in self._layers]
        return tuple((each[:, 0], each[:, 1]) for each in rows)

    def _index(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._stamps.device)


def _stamps_of(token_ids: TokenArray | IndexArray, positions: IndexArray) -> IndexArray:
    """int64[rows, 2]."""
    ids = token_ids.astype(np.int64)
    first, second = ids + 7 * positions, ids // _NUM_STAMPS + positions // _NUM_STAMPS
    return np.stack((first, second), axis=1) % _NUM_STAMPS + 1


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
    """That of EAGLE heads: beside keys and values, the target's fused hidden rows.

    In the slot of position p lie that row of p, and the head's key and value of its row for p: that
    of token p and of the hidden row before it."""

    def __init__(
        self, host: Host, head: Eagle3Head | MtpHead, dtype: torch.dtype, context: int
    ) -> None:
        super().__init__(host, dtype, head.num_layers, context)
        self._head = head
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

    def read(self, request_id: str, token_ids: TokenArray) -> HeadContext | None:
        """The start of drafts behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.
        """
        # The first token has no key: no hidden row is before it.
        found = self._context(request_id, token_ids, first=1)
        if found is None:
            return None
        hidden = self._read_hidden(self._host.slots(request_id)[-1:])[0]
        return HeadContext(found.positions, found.layers, hidden)

    def _read_hidden(self, slots: IndexArray) -> torch.Tensor:
        """[rows, hidden]."""
        rows = self._hidden[self._index(slots)].flatten(1)
        return rows[:, : self._hidden_size].to(self._dtype)


class BlockCache(TextCache):
    """Keys and values of the target's fused hidden rows, which depend on one position each."""

    def __init__(self, host: Host, head: BlockHead, dtype: torch.dtype, context: int) -> None:
        super().__init__(host, dtype, len(head.spec.sights), context)
        self._head = head

    def write(self, rows: Sequence[StepRows]) -> None:
        """See `TextCache`."""
        places, taps = self._rows_of(rows)
        if places:
            positions = self._index(np.concatenate([each.positions for each in places]))
            self._keep(places, self._head.keys_values(self._head.fuse(taps), positions))

    def read(self, request_id: str, token_ids: TokenArray) -> TextContext | None:
        """The keys and values for a block behind a text; None where its last row is missing."""
        return self._context(request_id, token_ids, first=0)
