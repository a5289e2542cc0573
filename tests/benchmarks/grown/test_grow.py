"""A grown checkpoint computes the same function, whatever its shape."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.grown.__main__ import grow
from benchmarks.grown.layers import Shape
from tests.support.checkpoints import tiny_checkpoint

# 6 query heads over 2 key/value heads of dimension 8, like the demonstration target's.
_TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
}
_GROWN = Shape(hidden=96, layers=4, heads=16, kv_heads=4, intermediate=64)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    return tiny_checkpoint("llama", folder, tie_word_embeddings=request.param, **_TINY)


def texts() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(4, 288, length).tolist() for length in (23, 40)]


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([text])).logits[0] for text in texts()])


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(16, 4), (6, 2), (12, 12), (16, 8), (24, 2)],
    ids=lambda value: str(value),
)
def test_the_logits_of_transformers_are_those_of_the_source(
    source: Path, tmp_path: Path, heads: int, kv_heads: int
) -> None:
    shape = replace(_GROWN, heads=heads, kv_heads=kv_heads)
    grow(source, tmp_path / "grown", shape, texts=texts(), dtype=torch.float32)
    torch.testing.assert_close(logits(tmp_path / "grown"), logits(source), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("spoil", [0.0, float("nan")], ids=["tolerance", "nan"])
def test_logits_that_differ_are_an_error(source: Path, tmp_path: Path, spoil: float) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += spoil
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArithmeticError, match="not the same function"):
        grow(folder, tmp_path / "grown", _GROWN, texts=texts(), tolerance=0.0)


def test_a_model_that_is_no_llama_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "qwen")
    with pytest.raises(ValueError, match="qwen3"):
        grow(folder, tmp_path / "grown", _GROWN, texts=texts())
