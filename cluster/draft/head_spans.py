"""How the rows of draft heads attend: to what is held of their texts, and to each other.

What is held is copied out of the target's pages, and the rows of drafts never lie there: of a
target on several ranks only the first one drafts, and must not take pages that the others do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from cluster.draft.heads.head import KeysValues
from cluster.engine.types import AttentionOptions
from cluster.records import record


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
