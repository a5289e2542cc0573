"""Weights in few bits: integers in groups of a row's inputs, each with a scale and a least value.

    weight[o, i] = scale[o, i // group] * q[o, i] + minimum[o, i // group]

GGUF's blocks are of this form: Q4_0 and Q4_1 (32 inputs), Q8_0 (32, no minimum), and, with their
scales multiplied out, Q4_K (32) and Q6_K (16, no minimum).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """A matrix [out, in] of a linear layer.

    bits: 4 (q is 0 to 15) or 8 (q is -128 to 127, minimum None).  q: uint8 or int8 [out, in].
    scale, minimum: float16 [out, in / group].
    """

    bits: int
    group: int
    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.q.shape[0], self.q.shape[1]

    def dequantized(self) -> torch.Tensor:
        """The weights that it stands for, float32[out, in]."""
        grouped = (self.q.shape[0], -1, self.group)
        weights = self.q.float().view(grouped) * self.scale.float()[..., None]
        if self.minimum is not None:
            weights = weights + self.minimum.float()[..., None]
        return weights.view(self.q.shape)
