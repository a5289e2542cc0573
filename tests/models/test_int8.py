"""Weights that are kept in int8 are those that were saved, up to half a step of their row."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.config.schema import EngineConfig
from cluster.engine.loading.model import load_model
from cluster.errors import ConfigError
from cluster.models.grouped import load_int8, save_int8
from cluster.models.weights import INT8
from tests.support.engine.driver import Factory


@pytest.fixture
def folder(checkpoint_factory: Factory, tmp_path: Path) -> Path:
    """A tiny Llama in int8."""
    source = checkpoint_factory("llama")
    packed = tmp_path / "packed"
    shutil.copytree(source, packed, ignore=shutil.ignore_patterns("*.safetensors"))
    network = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    save_int8(network.state_dict(), packed)
    return packed


def test_every_weight_is_within_half_a_step_of_its_row(folder: Path, llama_folder: Path):
    state = load_int8(folder)
    assert state is not None
    network = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    assert state.keys() == network.state_dict().keys()
    for name, tensor in network.state_dict().items():
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
    with pytest.raises(ConfigError, match=reason):
        load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
