"""The decoder layers of draft heads: transformers' own, whose attention is the engine's seam.

A forward is given a `LayerPlan`, as the target's is, and what a layer attends to is the plan's
affair (`cluster.draft.head_attention`).
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cluster.engine.attention import seam
from cluster.engine.types import AttentionOptions

Config = TypeVar("Config", bound=PreTrainedConfig)

# Of rows: [rows, kv heads, dim] each.
KeysValues = tuple[torch.Tensor, torch.Tensor]
# Cosines and sines, [1, rows, dim] each.
Rotation = tuple[torch.Tensor, torch.Tensor]


def planned(config: Config) -> Config:
    """A configuration for layers that attend by the plan of their forward."""
    seam.register()
    own = copy.copy(config)
    own._attn_implementation = seam.IMPLEMENTATION
    return own


def keys_values(attention: Any, rows: torch.Tensor, rotation: Rotation) -> KeysValues:
    """The keys and values that a Llama's or a Qwen3's attention makes of rows, without attending.

    rows: [rows, hidden], normalised where the layer does so."""
    key, value = (
        projection(rows).view(len(rows), -1, attention.head_dim)
        for projection in (attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    return apply_rotary_pos_emb(key[None], key[None], *rotation, unsqueeze_dim=2)[1][0], value


class Noting:
    """A `LayerPlan` that notes the keys and values that pass by, in the order of the layers."""

    def __init__(self, plan: seam.LayerPlan | None = None) -> None:
        """plan: attends; None: nothing is attended to, and the layer's output is of no use."""
        self.noted: list[KeysValues] = []
        self._plan = plan

    def attend_layer(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `LayerPlan`."""
        self.noted.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        if self._plan is None:
            return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        return self._plan.attend_layer(layer, query, key, value, options)
