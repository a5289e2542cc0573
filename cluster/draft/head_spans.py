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
