"""The base of all draft heads: the tokens that they write, and numbers that must not be rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import nn


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
