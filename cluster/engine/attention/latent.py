"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1): one vector is kept of a token.

The keys of all heads are products K c of a token's latent c, its values V c, beside which all heads
share a key's rotated part.  As q (K c) = (q K) c, queries are brought to the latents instead, which
then are key and value at once, of one head for all; what was attended to is brought to values by V.
"""

from __future__ import annotations

from typing import Any, cast

import torch


class LatentProjection(torch.nn.Linear):
    """A plain linear layer of keys and values, whose weight is read: never packed."""


class LatentAttention(torch.nn.Module):
    """transformers' module, whose keys and values are the latents themselves: our attention
    functions ask it for queries of them, and bring it what these attended to."""

    config: Any
    kv_b_proj: LatentProjection
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int

    def expand_kv(
        self, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rotated parts, [1, 1, rows, size] each -> keys and values."""
        if self.config._attn_implementation == "eager":  # which the check at load compares with
            module: Any = super()
            return module.expand_kv(kv_nope, k_rot)
        latents = torch.cat((kv_nope, k_rot), dim=-1)
        return latents, latents

    def to_latents(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [1, heads, rows, head_dim] -> those of latents, [1, heads, rows, size]."""
        size = self.qk_nope_head_dim
        return torch.cat((query[..., :size] @ self._weights()[:, :size], query[..., size:]), -1)

    def to_values(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of latents [1, rows, heads, size] -> sums of values, [1, rows, heads, head_dim]."""
        latents = attended[..., : self.kv_lora_rank].transpose(1, 2)
        values = latents @ self._weights()[:, self.qk_nope_head_dim :].mT
        return values.transpose(1, 2).contiguous()

    def _weights(self) -> torch.Tensor:
        """[heads, dims of keys and then of values, dims of latents]"""
        size = self.qk_nope_head_dim + self.v_head_dim
        return self.kv_b_proj.weight.view(-1, size, self.kv_lora_rank)


def adopt(module: torch.nn.Module) -> None:
    """Have the latent attention of a transformers model keep latents."""
    for each in module.modules():
        kind = type(each)
        if hasattr(kind, "expand_kv") and not isinstance(each, LatentAttention):
            # The class, not the instance's methods: copies of a layer have numbers of their own.
            each.__class__ = type(kind.__name__, (LatentAttention, kind), {})
            each.kv_b_proj = _readable(each)


def _readable(attention: Any) -> LatentProjection:
    """The layer of keys and values; what is quantised is widened, since it has to be multiplied
    from either side."""
    linear = attention.kv_b_proj
    if type(linear) is torch.nn.Linear and type(linear.weight) is torch.nn.Parameter:
        linear.__class__ = LatentProjection
        return cast("LatentProjection", linear)
    like = attention.kv_a_layernorm.weight
    rows = linear(torch.eye(len(like), dtype=like.dtype, device=like.device))  # [latent, out]
    widened = LatentProjection(len(like), rows.shape[1], bias=False, device="meta")
    widened.weight = torch.nn.Parameter(rows.T.contiguous(), requires_grad=False)
    return widened
