"""The cache of drafters inside the target, in layers of their own on the pages of its KV cache.

In the slot of a position lie the keys and values that rows behind it attend to, of each of the
drafter's layers.  So they are there wherever the target's own keys are: after prefix hits, chunks,
preemptions and accepted paths, with no state by request.  The host keeps of every slot which token
and position it was written for: that tells rows that are there from those that are not, or are
another text's, and nothing is asked of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.core import TokenArray
from cluster.draft.heads.head import Head, KeysValues, Sight
from cluster.draft.inside import Host, IndexArray, StepRows
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.errors import ConfigError
from cluster.records import record

# How the rows of draft heads attend: to what is held of their texts, and to each other.
#
# What is held is copied out of the target's pages, and the rows of drafts never lie there: of a
# target on several ranks only the first one drafts, and must not take pages that the others do
# not.


class Span:
    """A text's keys and values of each layer, [1, kv heads, rows, dim], to which each pass adds
    those of its rows.  num_held: rows that were held of the text."""

    def __init__(self, layers: Sequence[KeysValues]) -> None:
        """layers: what is held of the text."""
        self.num_held = len(layers[0][0]) if layers else 0
        self.layers = [
            (keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in layers
        ]

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
        """Add rows to a layer; returns all of its keys and values."""
        keys, values = self.layers[layer]
        self.layers[layer] = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        return self.layers[layer]


@record
class TextRows:
    """One text's rows of a pass, which are neighbours.

    masks: by layer, bool[rows, the span's and these rows], which of them each row sees; None = all.
    """

    span: Span
    num_rows: int
    masks: Sequence[torch.Tensor | None]


class SpanAttention:
    """The `LayerPlan` of a pass over rows of several texts."""

    def __init__(self, parts: Sequence[TextRows]) -> None:
        """parts: in the order of the rows."""
        self._parts = parts
        self._sizes = [part.num_rows for part in parts]

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `LayerPlan`."""
        rows = zip(
            *(torch.split(each, self._sizes, dim=2) for each in (query, key, value)), strict=True
        )
        found: list[torch.Tensor] = []
        for part, (own, keys, values) in zip(self._parts, rows, strict=True):
            keys, values = part.span.extend(layer, keys, values)
            attended = scaled_dot_product_attention(
                own,
                keys,
                values,
                attn_mask=part.masks[layer],
                scale=options.scaling,
                enable_gqa=True,
            )
            found.append(attended.transpose(1, 2))
        return torch.cat(found, dim=1)


def kv_layers(layers: Any, like: LayerSpec, *, takes_before: bool) -> list[LayerSpec]:
    """A head's layers beside the target's: its keys and values; where rows take those before them,
    the fused hidden rows, one half as key, one as value.

    layers: the configuration of its decoder layers."""
    shapes = [(layers.num_key_value_heads, layers.head_dim)] * layers.num_hidden_layers
    if takes_before:
        shapes.append((1, (layers.hidden_size + 1) // 2))
    return [LayerSpec(heads, dim, like.dtype, like.device) for heads, dim in shapes]


@record
class TextContext:
    """What rows behind a text draft from.

    positions: int64[rows], those that are held.  layers: of each, keys and values.  hidden:
    [hidden], what the first row takes: that of the last token that has a row; of no use to heads
    whose rows take none.
    """

    positions: IndexArray
    layers: Sequence[KeysValues]
    hidden: torch.Tensor


@record
class Places:
    """Where a step's rows of one text belong: int64[rows] each.  before: slot of the token before
    the first, None at the beginning of the text."""

    request_id: str
    token_ids: IndexArray
    positions: IndexArray
    slots: IndexArray
    before: int | None


class TextCache:
    """Keys and values by slot, and the target's fused hidden rows for heads whose rows take those
    before them.

    In the slot of position p lie that row of p, and the head's key and value of its row for p: that
    of token p and of the hidden row before it, or of the fused row of p alone."""

    def __init__(self, host: Host, head: Head, dtype: torch.dtype, context: int) -> None:
        """dtype: that the head computes in.  context: tokens before a row that it attends to at
        most."""
        self._host = host
        self._head = head
        self._context_len = context
        self._dtype = dtype
        if len(host.caches) == 0:
            raise ConfigError(
                "the target's engine was loaded without the drafter's layers; load it by "
                "cluster.worker.host.load_target_engine",
                param="model",
            )
        self._layers = host.caches[: len(head.layers)]
        self._hidden = host.caches[-1]  # of heads that take none, of no use
        # Of each slot the token and position that it was written for; -1 = nobody wrote it.
        self._stamps = np.full((len(self._hidden), 2), -1, np.int64)

    def write(self, rows: Sequence[StepRows]) -> None:
        """Keep the rows of texts that a step computed, as far as they have taps."""
        tapped = [(each, each.taps) for each in rows if each.taps is not None]
        if not tapped:
            return
        places = [self._places(each) for each, _ in tapped]
        taps = [each[torch.from_numpy(of.text_rows).to(each.device)] for of, each in tapped]
        fused = hidden = self._head.fuse(torch.cat(taps).flatten(1).to(self._dtype))
        token_ids, positions, slots = (
            np.concatenate([getattr(each, name) for each in places])
            for name in ("token_ids", "positions", "slots")
        )
        rotated, attending = positions, list[TextRows]()
        if self._head.takes_before:
            parts = torch.split(fused, [len(each.slots) for each in places])
            shifted = zip(places, parts, strict=True)
            hidden = torch.cat(
                [torch.cat((self._before(place, own), own[:-1])) for place, own in shifted]
            )
            rotated = np.maximum(positions - 1, 0)
            attending = [self._part(each) for each in places] if len(self._layers) > 1 else []
        found = self._head.keys_values(
            self._index(token_ids), hidden, self._index(rotated), SpanAttention(attending)
        )
        where = self._index(slots)
        for layer, (keys, values) in zip(self._layers, found, strict=True):
            layer[where] = torch.stack((keys, values), dim=1).to(layer.dtype)
        self._stamps[slots] = np.stack((token_ids, positions), axis=1)
        if self._head.takes_before:
            half = self._hidden.shape[-1]
            halves = torch.nn.functional.pad(fused, (0, 2 * half - fused.shape[1]))
            self._hidden[where] = halves.view(-1, 2, 1, half).to(self._hidden.dtype)

    def read(self, request_id: str, token_ids: TokenArray) -> TextContext | None:
        """The start of drafts behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  What is missing further up is
        left out.
        """
        length = len(token_ids) - 1
        slots = self._host.slots(request_id)
        if length < 1 or len(slots) != length:
            return None
        # Of rows that take those before them the first token has none, and so no key.
        first = max(int(self._head.takes_before), length - self._context_len)
        positions = np.arange(min(first, length - 1), length)
        is_there = self._is_there(slots, token_ids, positions)
        if not is_there[-1]:
            return None
        positions = positions[is_there & (positions >= first)]
        hidden = self._read_hidden(slots[-1:])[0]
        return TextContext(positions, self._held(slots[positions]), hidden)

    def nothing(self) -> TextContext:
        """The context of no text, for warming up: everything is zero, and no key is held."""
        spec = self._head.spec
        size, device = len(spec.taps) * spec.target_hidden_size, self._host.device
        taps, none = torch.zeros(1, size, dtype=self._dtype, device=device), np.empty(0, np.int64)
        return TextContext(none, self._held(none), self._head.fuse(taps)[0])

    def _places(self, rows: StepRows) -> Places:
        token_ids = rows.token_ids[rows.text_rows].astype(np.int64)
        first, stop = rows.first_position, rows.first_position + len(token_ids)
        slots = self._host.slots(rows.request_id)
        assert len(slots) >= stop, "the target holds what its step computed"
        before = int(slots[first - 1]) if first else None
        return Places(rows.request_id, token_ids, np.arange(first, stop), slots[first:stop], before)

    def _part(self, places: Places) -> TextRows:
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
        mask = torch.from_numpy(is_seen).to(self._host.device)
        return TextRows(Span(self._held(slots[positions])), len(rows), [mask] * len(self._layers))

    def _before(self, place: Places, own: torch.Tensor) -> torch.Tensor:
        """The hidden row before the first: [1, hidden]; any for the text's first token."""
        return own[:1] if place.before is None else self._read_hidden(np.array([place.before]))

    def _read_hidden(self, slots: IndexArray) -> torch.Tensor:
        """[rows, hidden]."""
        rows = self._hidden[self._index(slots)].flatten(1)
        return rows[:, : self._head.embed_tokens.embedding_dim].to(self._dtype)

    def _is_there(
        self, slots: IndexArray, token_ids: TokenArray, positions: IndexArray
    ) -> npt.NDArray[np.bool_]:
        """Of each of these positions of a text, True if its row was written for it."""
        expected = np.stack((token_ids[positions], positions), axis=1)
        found: npt.NDArray[np.bool_] = np.all(self._stamps[slots[positions]] == expected, axis=1)
        return found

    def _held(self, slots: IndexArray) -> tuple[KeysValues, ...]:
        """Keys and values of each layer in these slots."""
        where = self._index(slots)
        rows = [layer[where].to(self._dtype) for layer in self._layers]
        return tuple((each[:, 0], each[:, 1]) for each in rows)

    def _index(self, values: IndexArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._host.device)


def block_rows(
    head: Head, texts: Sequence[TokenArray], contexts: Sequence[TextContext], size: int
) -> torch.Tensor:
    """One pass of `Head.block` behind each of these texts: [texts, drafts, hidden]."""
    hidden = torch.stack([each.hidden for each in contexts])
    device, parts = hidden.device, list[TextRows]()
    for text, context in zip(texts, contexts, strict=True):
        places = len(text) - 1 + np.arange(size)
        masks = {
            sight: _mask(sight, context.positions, places, device) for sight in set(head.sights)
        }
        parts.append(TextRows(Span(context.layers), size, [masks[sight] for sight in head.sights]))
    return head.block(
        torch.tensor([int(text[-1]) for text in texts], device=device),
        hidden,
        # A row stands where the hidden row that it takes does.
        torch.tensor([len(text) - 1 - head.takes_before for text in texts], device=device),
        size,
        SpanAttention(parts),
    )


def _mask(
    sight: Sight, held: IndexArray, places: IndexArray, device: torch.device
) -> torch.Tensor | None:
    """Whom rows at `places` see: bool[rows, held and rows]; None = all.

    held: int64[n], positions of the text."""
    if sight.window is None and not sight.is_causal:
        return None
    distance = places[:, None] - np.concatenate((held, places))
    mask = np.ones_like(distance, dtype=np.bool_)
    if sight.window is not None:
        mask &= distance < sight.window
    if sight.is_causal:
        mask &= distance >= 0
    return torch.from_numpy(mask).to(device)
