"""Layers of transformers' that follow the paths of a tree without being attention.

Short convolutions (LFM2, LFM3): what a token brings into them is kept.  A causal convolution of a
few tokens needs no state that is rolled back: a token's input is its own, as its key is, and lies
in the same cache.  So trees, chunks, shared prefixes and evictions come with the slots, and a row
reads the inputs of its nearest ancestors, whoever they are.  For the gated delta rule see
`delta_rule`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from cluster.engine.attention.seam import PathPlan, layer_index


class PathLayer(torch.nn.Module):
    """In a step, the forward of transformers' module that it was put before.

    plan: of the call to come.  Not every version of transformers hands it on to such a module, so
    the module around it, which is given it, leaves it here.  Without one the forward is the
    module's own, which the check at load compares with."""

    plan: PathPlan | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **rest: Any) -> Any:
        """hidden_states [1, rows, hidden] -> the same shape."""
        plan, self.plan = self.plan, None
        if plan is None:
            return super().forward(hidden_states, *args, **rest)
        return self.follow(plan, hidden_states)

    def follow(self, plan: PathPlan, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def adopt(module: torch.nn.Module, suffix: str, path_kind: type[PathLayer]) -> None:
    """Have the layers of a transformers model whose class is so called follow a step's plan."""
    for around in module.modules():
        for name, each in around.named_children():
            kind = type(each)
            if kind.__name__.endswith(suffix) and not isinstance(each, path_kind):
                # The class, not the instance's forward, and by name: copies of a layer have
                # numbers and children of their own.
                each.__class__ = type(kind.__name__, (path_kind, kind), {})
                around.register_forward_pre_hook(partial(_leave_plan, name), with_kwargs=True)


def _leave_plan(name: str, around: Any, args: Any, given: dict[str, Any]) -> None:
    getattr(around, name).plan = given.get("plan")


class PathConvolution(PathLayer):
    """transformers' module: out(c * conv(b * x))."""

    in_proj: torch.nn.Module
    conv: torch.nn.Conv1d
    out_proj: torch.nn.Module

    def follow(self, plan: PathPlan, hidden_states: torch.Tensor) -> torch.Tensor:
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        states, weight = (b * x)[0], self.conv.weight.squeeze(1)
        sums = plan.convolve_layer(layer_index(self), states, weight).to(states.device)
        if self.conv.bias is not None:
            sums = sums + self.conv.bias
        return self.out_proj(c * sums)


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
        return own.out_proj(normed.view(*mixed.shape[:2], -1))
