"""Products with weights in groups of few bits: those of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import products
from cluster.engine.cpu.narrow import multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.models.grouped import GroupedWeight
from tests.support.engine.driver import check_near, load_engine, load_oracle
from tests.support.engine.native import formats, needs_bfloat16
from tests.support.models.grouped_weights import grouped_weight

Factory = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("several_threads")


def in_groups(module: Any) -> dict[str, GroupedWeight]:
    """Weights for every linear layer of the model, of several kinds, which the model is given."""
    weights = {}
    for number, (name, layer) in enumerate(module.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            kind = [(4, 32), (4, 16), (8, 16)][number % 3]
            weights[name] = weight = grouped_weight(*layer.weight.shape, *kind)
            layer.weight.data = (weight.dequantized() * 0.05).to(layer.weight.dtype)
            scale, minimum = weight.scale * 0.05, weight.minimum
            assert minimum is not None
            weights[name] = GroupedWeight(*kind, weight.q, scale, minimum * 0.05)
    return weights


@needs_bfloat16
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_models_fused_layers_multiply_in_groups(
    kernels: Kernels, architecture: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    folder = checkpoint_factory(
        architecture, dtype=torch.bfloat16, head_dim=16, hidden_size=64, intermediate_size=96
    )
    original = load_oracle(folder).bfloat16()
    weights = in_groups(original)
    original.save_pretrained(tmp_path)
    wide, narrow = (load_engine(tmp_path, dtype="bfloat16") for _ in range(2))
    module = narrow.model.module
    names = [name for _, originals in products(module) for name in originals]
    assert sorted(names) == sorted(weights)
    assert multiply_in_groups(module, kernels, weights) == 0  # they multiply in bfloat16 by now
    for layer, _ in products(module):
        layer.format = Format.BF16
    assert multiply_in_groups(module, kernels, weights) == len(list(products(module)))
    assert formats(narrow) == {Format.GROUPED}
    check_near(narrow, wide)


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
