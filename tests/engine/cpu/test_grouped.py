"""Products with weights in groups of few bits: those of the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import products
from cluster.engine.cpu.narrow import multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.models.grouped import GroupedWeight
from tests.support.engine.driver import load_engine, load_oracle, rows, run, varied_works
from tests.support.models.grouped_weights import grouped_weight

Factory = Callable[..., Path]

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="needs a C++ compiler"),
    pytest.mark.usefixtures("several_threads"),
]


@pytest.fixture
def kernels() -> Kernels:
    loaded = native.load()
    assert loaded is not None
    return loaded


@pytest.mark.parametrize(
    ("bits", "group", "has_minimum"),
    [(4, 32, True), (4, 32, False), (8, 32, False), (8, 16, True), (4, 16, True), (4, 128, True)],
)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 1), (128, 63), (256, 64), (384, 200)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_rounded_rows_and_every_row_is_on_its_own(
    kernels: Kernels,
    bits: int,
    group: int,
    has_minimum: bool,
    inputs: int,
    outputs: int,
    has_bias: bool,
) -> None:
    torch.manual_seed(1)
    weight = grouped_weight(outputs, inputs, bits, group, has_minimum=has_minimum)
    bias = torch.randn(outputs) if has_bias else None
    packed, given = kernels.pack_grouped(weight), torch.randn(130, inputs)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows, packed, bias, outputs, Format.GROUPED)

    together = product(given)
    expected = torch.nn.functional.linear(
        given.bfloat16().double(),
        weight.dequantized().double(),
        None if bias is None else bias.double(),
    )
    torch.testing.assert_close(together.double(), expected, atol=1e-4, rtol=1e-5)
    for count in (*range(1, 65), 96, 97, 129):
        assert torch.equal(product(given[-count:]), together[-count:]), count
    order = torch.randperm(130)
    assert torch.equal(product(given[order]), together[order])
    assert product(given[:0]).shape == (0, outputs)


def test_products_in_4_bits_are_torchs(kernels: Kernels) -> None:
    """Its weights are scale * (q - 8) + zero, in bfloat16 but for the integers."""
    weight = grouped_weight(64, 128, 4, 32)
    assert weight.minimum is not None
    scale, minimum = weight.scale.bfloat16(), weight.minimum.bfloat16()
    weight = GroupedWeight(4, 32, weight.q, scale.half(), minimum.half())
    zero = (minimum.float() + 8.0 * scale.float()).bfloat16()
    zeros = torch.stack([scale.T, zero.T], dim=2).contiguous()
    given = torch.randn(9, 128)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.q.int(), 1)
        expected = torch.ops.aten._weight_int4pack_mm_for_cpu(given.bfloat16(), packed, 32, zeros)
    except (AttributeError, NotImplementedError):
        pytest.skip("this torch has no products in 4 bits on a CPU")
    found = kernels.linear(given, kernels.pack_grouped(weight), None, 64, Format.GROUPED)
    assert (found - expected.float()).norm() < 1e-2 * found.norm()


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


def formats(engine: Any) -> set[Format]:
    modules = engine.model.module.modules()
    return {each.format for each in modules if isinstance(each, PackedLinear)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_models_fused_layers_multiply_in_groups(
    kernels: Kernels, architecture: str, checkpoint_factory: Factory, tmp_path: Path
) -> None:
    if not kernels.multiplies_bf16:
        pytest.skip("the processor does not multiply bfloat16")
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
    for work in varied_works():
        found, wanted = rows(run(narrow, work)), rows(run(wide, work))
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.median()) < 0.05
        assert float(error.max()) < 0.2


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
