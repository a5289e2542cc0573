"""Random weights in groups of few bits."""

import torch

from cluster.models.grouped import GroupedWeight


def grouped_weight(
    num_outputs: int, num_inputs: int, bits: int, group: int, *, has_minimum: bool = True
) -> GroupedWeight:
    """Of about the size 1; the first group of the first output is zero."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    low, high, dtype = (0, 16, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    q = torch.randint(low, high, (num_outputs, num_inputs), generator=generator, dtype=dtype)
    shape = (num_outputs, num_inputs // group)
    scale = torch.rand(shape, generator=generator) * 2.0 / high
    minimum = torch.randn(shape, generator=generator)
    q[0, :group], scale[0, 0], minimum[0, 0] = 0, 0.0, 0.0
    return GroupedWeight(bits, group, q, scale.half(), minimum.half() if has_minimum else None)
