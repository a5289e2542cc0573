"""The cache of drafters inside the target, in layers of their own on the pages of its KV cache.

In the slot of a position lie the keys and values that rows behind it attend to, of each of the
drafter's layers.  So they are there wherever the target's own keys are: after prefix hits, chunks,
preemptions and accepted paths, with no state by request.  The host keeps of every slot which token
and position it was written for: that tells rows that are there from those that are not, or are
another text's, and nothing is asked of the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.core import TokenArray
from cluster.draft.heads.head import Head, KeysValues, Sight
from cluster.draft.host import Host
from cluster.draft.inside import IndexArray, StepRows
from cluster.engine.graphs.capture import Replay, Staging
from cluster.engine.reminder import in_a_line
from cluster.engine.types import AttentionOptions
from cluster.records import record

log = logging.getLogger(__name__)

# Rows of a step that a graph writes: texts that decode; what chunks of prompts have is worth more
# than its launches.
_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
_NUM_INDICES = 5


# How rows attend: to what is held of their texts, and to each other.  What is held is copied out of
# the target's pages, and the rows of drafts never lie there: of a target on several ranks only the
# first one drafts, and must not take pages that the others do not.


class Span:
    """A text's keys and values of each layer, [2, kv heads, rows, dim], to which each pass adds
    those of its rows.  num_held: rows that were held of the text."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: what is held of the text, [rows, 2, kv heads, dim] each."""
        self.num_held = len(layers[0])
        self.layers = [rows.permute(1, 2, 0, 3) for rows in layers]

    def extend(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> KeysValues:
        """Add rows to a layer; returns all of its keys and values."""
        held = torch.cat((self.layers[layer], torch.cat((key, value))), dim=2)
        self.layers[layer] = held
        return held[:1], held[1:]


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


@record
class TextContext:
    """What rows behind a text draft from.

    positions: int64[rows], those that are held.  span: their keys and values.  hidden: [hidden],
    what the first row takes: that of the last token that has a row; of no use to heads whose rows
    take none.
    """

    positions: IndexArray
    span: Span
    hidden: torch.Tensor


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
        self._layers = host.caches[: len(head.layers)]
        self._hidden = host.caches[-1]  # of heads that take none, of no use
        # Of each slot the token and position that it was written for; -1 = nobody wrote it.
        self._stamps = np.full((len(self._hidden), 2), -1, np.int64)
        self._capture = host.capture
        self._replays: dict[int, Replay] = {}  # by width
        self._taps: torch.Tensor | None = None
        self._staging = Staging(2 * _NUM_INDICES * _WIDTHS[-1], host.device)

    def write(self, rows: Sequence[StepRows]) -> None:
        """Keep the rows of texts that a step computed, as far as they have taps."""
        tapped = [each for each in rows if each.taps is not None]
        found = [each.taps for each in rows if each.taps is not None]
        if not tapped:
            return
        starts = np.cumsum([0, *map(len, found)])
        places = [self._places(*each) for each in zip(tapped, starts, strict=False)]
        given = np.concatenate(places, axis=1)
        self._stamps[given[2]] = given[:2].T
        attending = list[TextRows]()
        if self._head.takes_before and len(self._layers) > 1:
            pairs = zip(tapped, places, strict=True)
            attending = [self._part(each.request_id, own[1]) for each, own in pairs]
        given[1] = np.maximum(given[1] - self._head.takes_before, 0)
        taps = found[0] if len(found) == 1 else torch.cat(found)
        if attending or not self._store_by_graph(given, taps):
            indices = self._index(given)
            self._store(indices, taps[indices[-1]], SpanAttention(attending))

    def _store(self, indices: torch.Tensor, taps: torch.Tensor, plan: SpanAttention) -> None:
        """Write rows.

        indices: int64[5, rows], tokens, positions of the rotary embedding, slots, and those of the
        tokens before; the last is of no use here.  taps: [rows, taps, hidden]."""
        token_ids, positions, slots, before = indices[:4]
        hidden = self._head.fuse(taps.flatten(1).to(self._dtype))
        if self._head.takes_before:
            half = self._hidden.shape[-1]
            halves = torch.nn.functional.pad(hidden, (0, 2 * half - hidden.shape[1]))
            self._hidden[slots] = halves.view(-1, 2, 1, half).to(self._hidden.dtype)
            hidden = self._read_hidden(before)
        found = self._head.keys_values(token_ids, hidden, positions, plan)
        for layer, (keys, values) in zip(self._layers, found, strict=True):
            layer[slots] = torch.stack((keys, values), dim=1).to(layer.dtype)

    def _store_by_graph(self, given: IndexArray, taps: torch.Tensor) -> bool:
        """`_store` by a graph; False where there is none for so many rows."""
        num_rows = given.shape[1]
        width = next((each for each in _WIDTHS if each >= num_rows), 0)
        if self._capture is None or not width:
            return False
        if self._taps is None:
            self._taps = taps.new_empty(_WIDTHS[-1], *taps.shape[1:])
        # The last row stands for padding: what is written twice is the same.
        padded = given[:, np.minimum(np.arange(width), num_rows - 1)]
        indices = self._staging.put(padded)
        torch.index_select(taps, 0, indices[-1], out=self._taps[:width])
        if width not in self._replays:
            own = self._taps[:width]
            try:
                self._replays[width] = self._capture(
                    lambda: self._store(indices, own, SpanAttention(()))
                )
            except Exception as error:  # noqa: BLE001 - a head's own code may do what no graph can
                log.warning("rows of a head are kept without CUDA graphs: %s", in_a_line(error))
                self._capture = None
                return False
        self._replays[width]()
        return True

    def read(self, request_id: str, token_ids: TokenArray) -> TextContext | None:
        """The start of drafts behind a text; None where its last row is missing.

        token_ids: the text, of which the last token has no row yet.  What is missing further up is
        left out.
        """
        found = self.find(request_id, token_ids)
        if found is None:
            return None
        positions, slots = found
        hidden = self._read_hidden(self._index(slots[-1:]))[0]
        return TextContext(positions, self._held(slots[positions]), hidden)

    def find(self, request_id: str, token_ids: TokenArray) -> tuple[IndexArray, IndexArray] | None:
        """The positions that `read` gives, and the slots of all."""
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
        return positions[is_there & (positions >= first)], slots

    def _places(self, rows: StepRows, start: int) -> IndexArray:
        """Where a step's rows of one text belong: int64[5, rows], as `_store` takes them, but for
        positions as they are in the text.  start: of all its rows among the step's."""
        token_ids = rows.token_ids[rows.text_rows]
        positions = rows.first_position + np.arange(len(token_ids))
        slots = self._host.slots(rows.request_id)
        assert len(slots) > positions[-1], "the target holds what its step computed"
        # Of the text's first token any row does as the one before.
        before = slots[np.maximum(positions - 1, 0)]
        return np.stack((token_ids, positions, slots[positions], before, start + rows.text_rows))

    def _part(self, request_id: str, own: IndexArray) -> TextRows:
        """A text's rows at these positions, which attend to those before them."""
        first, slots = int(own[0]), self._host.slots(request_id)
        positions = np.arange(max(1, first - self._context_len), max(1, first))
        positions = positions[self._is_there(slots, self._host.token_ids(request_id), positions)]
        keys, rows = np.concatenate((positions, own)), own[:, None]
        is_seen = (keys >= 1) & (keys <= rows) & (keys >= rows - self._context_len)
        # The text's first token has no row; it sees itself, so that it sees something.
        is_seen |= keys == rows
        mask = torch.from_numpy(is_seen).to(self._host.device)
        return TextRows(self._held(slots[positions]), len(rows), [mask] * len(self._layers))

    def _read_hidden(self, slots: torch.Tensor) -> torch.Tensor:
        """int64[rows] -> [rows, hidden]."""
        rows = self._hidden[slots].flatten(1)
        return rows[:, : self._head.embed_tokens.embedding_dim].to(self._dtype)

    def _is_there(
        self, slots: IndexArray, token_ids: TokenArray, positions: IndexArray
    ) -> npt.NDArray[np.bool_]:
        """Of each of these positions of a text, True if its row was written for it."""
        expected = np.stack((token_ids[positions], positions), axis=1)
        return np.all(self._stamps[slots[positions]] == expected, axis=1)

    def _held(self, slots: IndexArray) -> Span:
        """Keys and values of each layer in these slots."""
        where = self._index(slots)
        return Span([layer[where].to(self._dtype) for layer in self._layers])

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
        parts.append(TextRows(context.span, size, [masks[sight] for sight in head.sights]))
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
