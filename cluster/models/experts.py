"""Experts of mixture models as plain linear layers: what is known of those is known of experts.

transformers holds all experts of a layer in two parameters:

    gate_up_proj  [experts, 2 * inner, size], gates first
    down_proj     [experts, size, inner]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch


class Expert(torch.nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = map(linear_of, gate_up.chunk(2))
        self.down_proj = linear_of(down)
        self.act_fn = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, size] -> the same shape."""
        inner: torch.Tensor = self.act_fn(self.gate_proj(rows)) * self.up_proj(rows)
        return self.down_proj(inner)


class Experts(torch.nn.Module):
    """The experts of one layer, by their numbers; their weights are views of the stacked ones."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        weights = zip(stacked.gate_up_proj, stacked.down_proj, strict=True)
        for number, (gate_up, down) in enumerate(weights):
            self.add_module(str(number), Expert(gate_up, down, stacked.act_fn))

    def __len__(self) -> int:
        return len(self._modules)

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """rows [n, size]; chosen [n, k]: numbers of experts; shares [n, k] -> [n, size].

        A row's products are summed in the order of its own choices, one after the other, so that no
        other row changes a bit."""
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self)).tolist()
        parts = torch.split(rows[order // chosen.shape[1]], counts)
        experts = zip(self.children(), parts, strict=True)
        sorted_products = torch.cat([expert(part) for expert, part in experts if len(part)])
        products = torch.empty_like(sorted_products)
        products[order] = sorted_products
        weighted = products.view(*chosen.shape, -1) * shares[..., None]
        return reduce(torch.add, weighted.unbind(1)).to(rows.dtype)


def unstacked(
    module: torch.nn.Module, is_same: Callable[[Any, Experts], bool] = lambda *_: True
) -> Any:
    """The module, in which experts that transformers has stacked stand one by one.

    is_same: of the stacked ones and ours; others stay."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_stacked(child) and is_same(child, experts := Experts(child)):
                setattr(parent, name, experts)
    return module


def _is_stacked(module: Any) -> bool:
    own = dict(module.named_parameters())
    if own.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    gate_up, down = module.gate_up_proj, module.down_proj
    if gate_up.dim() != 3 or type(gate_up) is not torch.nn.Parameter:
        return False
    count, both, size = gate_up.shape
    return bool(down.shape == (count, size, both // 2))


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    """A linear layer around these tensors: weight [out, in], bias [out]."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear
