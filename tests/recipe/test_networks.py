"""A saved network is an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from cluster.errors import ConfigError
from models.recipe.corpus import train_tokenizer
from models.recipe.demo import Shape, build, load, save

TINY = Shape(32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("network")
    tokenizer = train_tokenizer(["for every text there is a network\n"] * 5, vocab_size=280)
    save(build(TINY, end_of_text_id=0, vocab_size=len(tokenizer)), tokenizer, path)
    return path


def test_weights_are_bfloat16_and_the_tied_matrix_is_stored_once(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights


def test_both_stop_tokens_end_generation(folder: Path) -> None:
    config = json.loads((folder / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(config["eos_token_id"]) == ["<|endoftext|>", "<|end|>"]


def test_folder_without_a_network_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent: no model here"):
        load(tmp_path / "absent")
