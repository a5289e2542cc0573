"""Weights in groups: what they stand for."""

from __future__ import annotations

import torch

from cluster.models.grouped import GroupedWeight


def test_each_group_has_its_scale_and_its_minimum() -> None:
    weight = GroupedWeight(
        bits=4,
        group=2,
        q=torch.tensor([[0, 15, 1, 2]], dtype=torch.uint8),
        scale=torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        minimum=torch.tensor([[-1.0, 3.0]], dtype=torch.float16),
    )
    assert weight.shape == (1, 4)
    assert weight.dequantized().tolist() == [[-1.0, 6.5, 5.0, 7.0]]


def test_eight_bits_are_signed_and_have_no_minimum() -> None:
    weight = GroupedWeight(
        bits=8,
        group=1,
        q=torch.tensor([[-128, 127]], dtype=torch.int8),
        scale=torch.tensor([[1.0, 2.0]], dtype=torch.float16),
        minimum=None,
    )
    assert weight.dequantized().tolist() == [[-128.0, 254.0]]
