"""transformers' layers of the gated delta rule, on the plan of a step; see `delta_rule`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from cluster.engine.attention.seam import PathLayer, PathPlan, layer_index


class PathDelta(PathLayer):
    """transformers' module of either shape: with its products joined, or one by one."""

    def follow(self, plan: PathPlan, hidden_states: torch.Tensor) -> torch.Tensor:
        own: Any = self  # with that module's fields
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
        output: torch.Tensor = own.out_proj(normed.view(*mixed.shape[:2], -1))
        return output
