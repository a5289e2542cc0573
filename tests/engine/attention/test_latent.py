"""Latent attention: one vector of a token is kept; text is what transformers' own module says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.core import TokenArray, TokenTree
from cluster.engine.attention.latent import LatentAttention, adopt
from cluster.engine.loading.inspection import check_loadable
from cluster.engine.work import Work
from cluster.errors import ConfigError
from tests.support.engine.adapters import merged_oracle, write_adapter
from tests.support.engine.driver import (
    GreedyDecoder,
    alike_prompts,
    check_near,
    expected_rows,
    generate_all,
    load_engine,
    load_oracle,
    prompt,
    rows,
    run,
)
from tests.support.engine.tiny import tiny

NUM_TOKENS = 12
SIZE = 16 + 8  # of what is kept: a latent, and the rotated part
TREE = TokenTree.of([5, 6, 7, 8, 9], [-1, 0, 0, 2, -1])
Factory = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(checkpoint_factory: Factory) -> Path:
    return checkpoint_factory("deepseek-v3")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


@pytest.fixture(scope="module")
def prompts() -> dict[str, TokenArray]:
    return alike_prompts((2, 9, 22, 37, 50), range(10, 16))


@pytest.fixture(scope="module")
def texts(oracle: Any, prompts: dict[str, TokenArray]) -> dict[str, list[int]]:
    return generate_all(oracle, prompts, NUM_TOKENS)


def test_greedy_text_of_thirty_prompts_equals_transformers(
    folder: Path, prompts: dict[str, TokenArray], texts: dict[str, list[int]]
) -> None:
    """Where drafts are right and wrong, prompts are cut, prefixes shared and requests preempted."""
    engine = load_engine(folder, max_batch_tokens=16, num_pages=40)
    decoder = GreedyDecoder(engine, prompts, NUM_TOKENS, np.random.default_rng(1), texts)
    assert decoder.run() == texts
    assert decoder.num_accepted > 30
    assert decoder.num_misses > 0
    assert all(decoder.counts[each] > 0 for each in ("preempted", "hits", "chunks"))
    assert engine.pages_in_use == 0


def test_queries_of_other_heads_are_found_at_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LatentAttention.to_latents
    monkeypatch.setattr(
        LatentAttention, "to_latents", lambda own, query: right(own, query).roll(1, dims=1)
    )
    with pytest.raises(ConfigError, match="logits are off by"):
        load_engine(folder)


def test_adapters_are_added_but_for_one_layer(folder: Path, tmp_path: Path) -> None:
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    adapter = write_adapter(folder, tmp_path / "a", targets)
    engine = load_engine(folder, adapters={"a": str(adapter)})
    found = rows(run(engine, Work("a", 0, prompt(20), TREE, adapter=1)))
    expected = expected_rows(merged_oracle(folder, adapter), prompt(20), TREE)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    other = write_adapter(folder, tmp_path / "b", ("kv_b_proj",))
    for load in (load_engine, lambda *_, **own: check_loadable(*_, tiny(*_, own), is_here=True)):
        with pytest.raises(ConfigError, match="kv_b_proj' is multiplied into queries"):
            load(folder, adapters={"b": str(other)})


class InEightBits(torch.nn.Module):
    """As a quantiser puts it in a linear layer's place."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().max() / 127
        self.weight = torch.nn.Parameter((linear.weight / scale).round().to(torch.int8), False)
        self.scale = scale

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ (self.weight.float() * self.scale).T


def test_quantised_weights_of_keys_and_values_are_widened(folder: Path) -> None:
    module = load_oracle(folder)
    for layer in module.model.layers:
        layer.self_attn.kv_b_proj = InEightBits(layer.self_attn.kv_b_proj)
    ids = torch.from_numpy(prompt(20).astype(np.int64))[None]
    with torch.inference_mode():
        expected = module(ids).logits
        adopt(module)
        module.set_attn_implementation("eager")
        torch.testing.assert_close(module(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert all(
        type(each.self_attn.kv_b_proj).__bases__ == (torch.nn.Linear,)
        for each in module.model.layers
    )


def test_rows_of_bfloat16_stay_close(checkpoint_factory: Factory) -> None:
    folder = checkpoint_factory("deepseek-v3", init_std=0.05)
    check_near(load_engine(folder, dtype="bfloat16"), load_engine(folder))
