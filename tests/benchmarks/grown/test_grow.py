"""A grown checkpoint computes the same function, whatever its shape."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.grown.__main__ import grow, saved_parts
from benchmarks.grown.layers import Shape, place_heads
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


def test_every_query_head_keeps_its_key_value_head() -> None:
    small = Shape(48, 2, 6, 2, 40)
    places = place_heads(small, _GROWN)
    assert places.query == (0, 1, 2, 4, 5, 6)
    ratio = _GROWN.heads // _GROWN.kv_heads
    for head, place in enumerate(places.query):
        assert places.key_value[place // ratio] == head // 3


def test_a_key_value_head_is_copied_where_the_ratio_shrinks() -> None:
    places = place_heads(Shape(48, 2, 6, 2, 40), Shape(96, 2, 8, 4, 40))
    assert places.key_value == (0, 0, 1, 1)
    assert places.query == (0, 1, 2, 4, 5, 6)


def test_too_few_key_value_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="4 are needed"):
        place_heads(Shape(48, 2, 6, 2, 40), Shape(96, 2, 6, 3, 40))


def test_nothing_but_what_must_be_zero_is_zero(source: Path, tmp_path: Path) -> None:
    grow(source, tmp_path / "grown", _GROWN, texts=texts(), dtype=torch.float32)
    for part in saved_parts(tmp_path / "grown"):
        for name, tensor in part.items():
            if any(word in name for word in ("q_proj", "k_proj", "v_proj", "gate", "up_proj")):
                assert torch.count_nonzero(tensor) > 0.99 * tensor.numel(), name
            if "norm" in name:
                assert bool((tensor != 0).all()), name
    identity = list(saved_parts(tmp_path / "grown"))[3]
    assert not identity["model.layers.2.self_attn.o_proj.weight"].any()
    assert not identity["model.layers.2.mlp.down_proj.weight"].any()


def test_the_same_seed_writes_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        grow(source, tmp_path / folder, _GROWN, texts=texts(), seed=seed)
    first, again, other = (
        [(tmp_path / folder / f"model-{part:05d}.safetensors").read_bytes() for part in range(6)]
        for folder in "abc"
    )
    assert first == again
    assert first != other


def test_the_config_says_what_it_was_grown_from(source: Path, tmp_path: Path) -> None:
    report = grow(source, tmp_path / "grown", _GROWN, texts=texts())
    config = json.loads((tmp_path / "grown" / "config.json").read_text())
    assert config["grown_from"]["model"] == source.name
    assert config["grown_from"]["shape"]["heads"] == 6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    assert model.dtype is torch.bfloat16
    assert report["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert report["equal argmax, saved"] > 0.9
    text = "def f(x):"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "grown")(text)["input_ids"]
        == AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    )


@pytest.mark.parametrize("spoil", [0.0, float("nan")], ids=["tolerance", "nan"])
def test_logits_that_differ_are_an_error(source: Path, tmp_path: Path, spoil: float) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += spoil
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArithmeticError, match="not the same function"):
        grow(folder, tmp_path / "grown", _GROWN, texts=texts(), tolerance=0.0)


def test_a_width_that_the_heads_do_not_divide_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of the 16 heads"):
        grow(source, tmp_path / "grown", replace(_GROWN, hidden=100), texts=texts())


def test_a_model_that_is_no_llama_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "qwen")
    with pytest.raises(ValueError, match="qwen3"):
        grow(folder, tmp_path / "grown", _GROWN, texts=texts())
