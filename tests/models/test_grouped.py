"""Weights in groups of few bits: what they stand for, and several as one.

Those that are kept in int8 are those that were saved, up to half a step of their row."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.schema import EngineConfig
from cluster.engine.loading.model import load_model
from cluster.models.grouped import GroupedWeight, in_four_bits, load_int8, stacked
from cluster.models.weights import INT8
from tests.support.engine.altered import in_int8
from tests.support.errors import config_error
from tests.support.models.grouped_weights import grouped_weight


def test_weights_stacked_stand_for_the_same_numbers():
    parts = [
        grouped_weight(8, 64, 4, 32),
        grouped_weight(4, 64, 4, 32, has_minimum=False),
        grouped_weight(6, 64, 8, 16, has_minimum=False),
    ]
    for chosen in (parts[:1], parts[:2], parts):
        whole = stacked(chosen)
        expected = torch.cat([each.dequantized() for each in chosen])
        assert torch.equal(whole.dequantized(), expected)
        assert whole.bits == max(each.bits for each in chosen)
        assert whole.group == min(each.group for each in chosen)


@pytest.mark.parametrize(("bits", "inputs", "group"), [(4, 48, 32), (5, 64, 32), (8, 48, 24)])
def test_sizes_that_do_not_fit_are_refused(bits: int, inputs: int, group: int):
    q, scale = torch.zeros(4, inputs, dtype=torch.uint8), torch.ones(4, inputs // group).half()
    with pytest.raises(ValueError, match=f"groups of {group} for {inputs} inputs"):
        GroupedWeight(bits, group, q, scale, None)
    with pytest.raises(ValueError, match=r"\(4, 3\), not \(4, 2\)"):
        GroupedWeight(4, 32, torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 3).half(), None)


@pytest.mark.parametrize(("inputs", "group"), [(384, 32), (400, 16)])
def test_a_weight_of_four_bits_is_off_by_half_a_step_at_most(inputs: int, group: int):
    given = torch.randn(5, inputs) * torch.logspace(-3, 1, 5)[:, None]
    given[1, :64], given[2, :64] = 0.25, 0.0
    found = in_four_bits(given)
    assert (found.bits, found.group) == (4, group)
    grouped = given.view(5, -1, group)
    steps = (grouped.amax(dim=2) - grouped.amin(dim=2)) / 15
    # The step and the least value are rounded to float16 first.
    allowed = 0.5 * steps + 2.0**-10 * grouped.abs().amax(dim=2) + 1e-6
    error = (found.dequantized() - given).view(5, -1, group).abs().amax(dim=2)
    assert (error <= allowed).all()
    assert in_four_bits(torch.randn(2, 40)) is None


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama in int8."""
    return in_int8(llama_folder, tmp_path / "packed")


def test_every_weight_is_within_half_a_step_of_its_row(folder: Path, llama_folder: Path):
    state = load_int8(folder)
    saved = load_file(llama_folder / "model.safetensors")
    assert state.keys() == saved.keys()
    for name, tensor in saved.items():
        if tensor.ndim == 2:
            step = tensor.abs().amax(dim=1, keepdim=True) / 127
            assert ((state[name] - tensor).abs() <= 0.501 * step).all(), name
        else:
            torch.testing.assert_close(state[name], tensor, rtol=8e-3, atol=0)
    assert load_int8(llama_folder) is None


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("model.embed_tokens.weight.scale", r"embed_tokens.weight lacks a scale for each row"),
        ("model.norm.weight", r"lacks 1 of its weights, model.norm.weight"),
    ],
)
def test_a_file_that_lacks_scales_or_a_weight_is_refused(folder: Path, lost: str, reason: str):
    packed = load_file(folder / INT8)
    del packed[lost]
    save_file(packed, folder / INT8)
    with config_error(reason):
        load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
