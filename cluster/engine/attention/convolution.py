"""Short convolutions along the paths of a tree (LFM2, LFM3): what a token brings into them is kept.

A causal convolution of a few tokens needs no state that is rolled back: a token's input is its
own, as its key is, and lies in the same cache.  So trees, chunks, shared prefixes and evictions
come with the slots, and a row reads the inputs of its nearest ancestors, whoever they are.
"""

from __future__ import annotations

from typing import Any

import torch

from cluster.engine.attention.seam import PathPlan, layer_index
from cluster.engine.types import LayerSpec


class PathConvolution(torch.nn.Module):
    """In a step, the forward of transformers' module that it was put before: out(c * conv(b * x)).

    Without a plan it is that module's own, which the check at load compares with."""

    in_proj: torch.nn.Module
    conv: torch.nn.Conv1d
    out_proj: torch.nn.Module

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, plan: PathPlan | None = None, **rest: Any
    ) -> Any:
        """hidden_states [1, rows, hidden] -> the same shape."""
        if plan is None:
            probe = rest.pop("probe", None)
            if probe is not None:
                size, kernel = hidden_states.shape[2] // 2, self.conv.kernel_size[0]
                like = hidden_states.dtype, hidden_states.device
                spec = LayerSpec(1, size, *like, kernel, is_convolution=True)
                probe.add(layer_index(self), spec)
            return super().forward(hidden_states, *args, **rest)
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        states, weight = (b * x)[0], self.conv.weight.squeeze(1)
        sums = plan.convolve_layer(layer_index(self), states, weight).to(states.device)
        if self.conv.bias is not None:
            sums = sums + self.conv.bias
        return self.out_proj(c * sums)
