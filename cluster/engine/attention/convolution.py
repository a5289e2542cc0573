"""Short convolutions along the paths of a tree (LFM2, LFM3): what a token brings into them is kept.

A causal convolution of a few tokens needs no state that is rolled back: a token's input is its
own, as its key is, and lies in the same cache.  So trees, chunks, shared prefixes and evictions
come with the slots, and a row reads the inputs of its nearest ancestors, whoever they are.
"""

from __future__ import annotations

import torch

from cluster.engine.attention.seam import PathLayer, PathPlan, layer_index


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
        found: torch.Tensor = self.out_proj(c * sums)
        return found
