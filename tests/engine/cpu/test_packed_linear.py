"""Packed linear layers: the plain ones' products, and nothing replaced that must stay."""

import pytest
import torch

from cluster.engine.cpu.packed_linear import PackedLinear, pack_linears


class Special(torch.nn.Linear):
    """Somebody's own linear layer, as quantisers make them."""


def test_other_layers_and_those_with_hooks_stay():
    hooked = torch.nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, inputs, output: output)
    offloaded = torch.nn.Linear(4, 4)
    offloaded.forward = offloaded.forward  # as accelerate replaces it
    module = torch.nn.Sequential(Special(4, 4), hooked, offloaded, torch.nn.Linear(4, 4).half())
    kinds = [type(child) for child in module]
    assert pack_linears(module) == 0
    assert [type(child) for child in module] == kinds


def test_a_library_that_computes_something_else_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: rows.new_ones(len(rows), 40))
    within = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(40, 16))
    module = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False), within)
    assert pack_linears(module) == 0
    assert not any(isinstance(child, PackedLinear) for child in module.modules())


def test_a_shared_weight_stays_with_the_layer_that_is_not_packed():
    embedding = torch.nn.Embedding(12, 8)
    output = torch.nn.Linear(8, 12, bias=False)
    output.weight = embedding.weight
    expected = embedding.weight.detach().clone()
    module = torch.nn.Sequential(embedding, output)
    assert pack_linears(module) == 1
    assert torch.equal(embedding.weight, expected)
    with torch.inference_mode():
        ids = torch.tensor([1, 5])
        torch.testing.assert_close(module(ids), expected[ids] @ expected.T)
