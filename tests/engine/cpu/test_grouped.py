"""Products with weights in groups of few bits: those of the numbers that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.narrow import multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear
from tests.support.models.grouped_weights import grouped_weight

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.mark.parametrize("is_wrong", [True, False])
def test_where_they_cannot_be_multiplied_weights_stay_widened(
    kernels: Kernels, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(64, 40, bias=False)
    weight = grouped_weight(40, 64, 4, 32)
    layer.weight.data = weight.dequantized().bfloat16().float()
    module = torch.nn.Sequential(PackedLinear(layer, kernels), PackedLinear(layer, kernels))
    real = Kernels.linear

    def wrong(self: Kernels, *given: Any) -> torch.Tensor:
        return real(self, *given) * (1.1 if given[-1] == Format.GROUPED else 1.0)

    if is_wrong:
        monkeypatch.setattr(Kernels, "linear", wrong)
    monkeypatch.setattr(kernels, "multiplies_bf16", is_wrong)
    assert multiply_in_groups(module, kernels, {"0": weight, "1": weight}) == 0
    rows = torch.randn(3, 64)
    torch.testing.assert_close(module[0](rows), layer(rows), atol=1e-4, rtol=1e-4)
