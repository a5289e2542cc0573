"""Latent attention: one vector of a token is kept; text is what transformers' own module says."""

from pathlib import Path

import pytest
import torch

from cluster.engine.attention.latent import LatentAttention, adopt
from cluster.engine.loading.inspection import check_loadable
from tests.support.engine.adapters import check_adapter, write_adapter
from tests.support.engine.driver import (
    Factory,
    check_crowd,
    check_near,
    load_engine,
    load_oracle,
    prompt,
)
from tests.support.engine.tiny import tiny
from tests.support.errors import config_error


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Factory) -> Path:
    return checkpoint_factory("deepseek-v3")


def test_greedy_text_of_thirty_prompts_equals_transformers(folder: Path):
    check_crowd(folder, range(10, 16))


def test_queries_of_other_heads_are_found_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch):
    right = LatentAttention.to_latents
    monkeypatch.setattr(
        LatentAttention, "to_latents", lambda own, query: right(own, query).roll(1, dims=1)
    )
    with config_error("logits are off by"):
        load_engine(folder)


def test_adapters_are_added_but_for_one_layer(folder: Path, tmp_path: Path):
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    check_adapter(folder, write_adapter(folder, tmp_path / "a", targets))
    other = write_adapter(folder, tmp_path / "b", ("kv_b_proj",))
    for load in (load_engine, lambda *_, **own: check_loadable(*_, tiny(*_, own), is_here=True)):
        with config_error("kv_b_proj' is multiplied into queries"):
            load(folder, adapters={"b": str(other)})


class InEightBits(torch.nn.Module):
    """As a quantiser puts it in a linear layer's place."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        integers = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(integers, False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight.float() * self.scale).T


def test_quantised_weights_of_keys_and_values_are_widened(folder: Path):
    module = load_oracle(folder)
    for layer in module.model.layers:
        layer.self_attn.kv_b_proj = InEightBits(layer.self_attn.kv_b_proj)
    ids = torch.as_tensor(prompt(20), dtype=torch.int64)[None]
    with torch.inference_mode():
        expected = module(ids).logits
        adopt(module)
        module.set_attn_implementation("eager")
        torch.testing.assert_close(module(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert all(
        type(each.self_attn.kv_b_proj).__bases__ == (torch.nn.Linear,)
        for each in module.model.layers
    )


def test_rows_of_bfloat16_stay_close(checkpoint_factory: Factory):
    folder = checkpoint_factory("deepseek-v3", init_std=0.05)
    check_near(load_engine(folder, dtype="bfloat16"), load_engine(folder))
