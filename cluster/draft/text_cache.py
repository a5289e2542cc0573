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

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenArray
from cluster.draft.heads.layers import KeysValues
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

    def __init__(self, host: Host, dtype: torch.dtype, num_layers: int) -> None:
        """dtype: that the drafter computes in.  num_layers: with keys and values."""
        self._host = host
        self._dtype = dtype
        self._layers = own_caches(host)[:num_layers]
        self._stamps = host.caches[-1]

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

    def _context(
        self, request_id: str, token_ids: TokenArray, context: int, first: int
    ) -> TextContext | None:
        """Keys and values for rows behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  context: of how many tokens
        before that at most.  first: the first position that has keys.  What is missing further up
        is left out.
        """
        length = len(token_ids) - 1
        slots = self._host.slots(request_id)
        if length < 1 or len(slots) != length:
            return None
        first = max(first, length - context)
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
