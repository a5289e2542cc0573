"""The parts of draft heads: their base, and transformers' decoder layers on the engine's seam.

A forward is given a `LayerPlan`, as the target's is, and what a layer attends to is the plan's
affair (`cluster.draft.head_attention`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn
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


class HeadModule(nn.Module):
    """token_map: int64[draft_vocab], the target's id of each output.

    Narrowing a head leaves its floating-point buffers as they are: frequencies of the rotary
    embedding, whose rounding moves far positions, and biases that route tokens to experts, of which
    the small differences count.
    """

    token_map: torch.Tensor

    @property
    def outputs(self) -> Sequence[nn.Linear]:
        """The layers that have an output for each token it writes."""
        return (cast("nn.Linear", self.lm_head),)

    def reorder(self, order: torch.Tensor) -> None:
        """Let output i be what output order[i] was."""
        for layer in self.outputs:
            layer.weight = nn.Parameter(layer.weight[order], requires_grad=False)
        self.token_map = self.token_map[order]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As `torch.nn.Module.to`."""
        exact = {
            name: buffer.clone()
            for name, buffer in self.named_buffers()
            if buffer.is_floating_point()
        }
        super().to(*args, **kwargs)
        for name, buffer in exact.items():
            owner, _, last = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, last, buffer.to(getattr(module, last).device))
        return self
