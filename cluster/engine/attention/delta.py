"""transformers' layers of the gated delta rule, on the plan of a step; see `delta_rule`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from cluster.engine.attention.delta_rule import delta_layer
from cluster.engine.attention.seam import PathPlan, layer_index
from cluster.engine.types import LayerSpec


class PathDelta(torch.nn.Module):
    """In a step, the forward of transformers' module that it was put before.

    Without a plan it is that module's own, which the check at load compares with."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, plan: PathPlan | None = None, **rest: Any
    ) -> Any:
        """hidden_states [1, rows, hidden] -> the same shape."""
        own: Any = self  # with that module's fields
        if plan is None:
            probe = rest.pop("probe", None)
            if probe is not None:
                like = LayerSpec(1, 1, hidden_states.dtype, hidden_states.device)
                heads = own.num_k_heads, own.head_k_dim, own.num_v_heads, own.head_v_dim
                probe.add(own.layer_idx, delta_layer(*heads, own.conv_kernel_size, like))
            return super().forward(hidden_states, *args, **rest)
        if hasattr(self, "in_proj_qkvz"):
            products = own.in_proj_qkvz(hidden_states), own.in_proj_ba(hidden_states)
            *brought, z, b, a = own.fix_query_key_value_ordering(*products)
            mixed = torch.cat([each.flatten(2) for each in brought], dim=2)
        else:
            layers = own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a
            mixed, z, b, a = (layer(hidden_states) for layer in layers)
        layer = layer_index(self)
        sums = plan.convolve_layer(layer, mixed[0], own.conv1d.weight.squeeze(1))
        sizes = own.key_dim, own.key_dim, own.value_dim
        query, key, value = ACT2FN[own.activation](sums.to(mixed.device)).split(sizes, dim=1)
        found = plan.delta_layer(
            layer,
            query.unflatten(1, (-1, own.head_k_dim)),
            key.unflatten(1, (-1, own.head_k_dim)),
            value.unflatten(1, (-1, own.head_v_dim)),
            -own.A_log.float().exp() * softplus(a[0].float() + own.dt_bias),
            b[0].sigmoid(),
        )
        normed = own.norm(found.flatten(0, 1).to(z.device), z.reshape(-1, own.head_v_dim))
        return own.out_proj(normed.view(*mixed.shape[:2], -1))
