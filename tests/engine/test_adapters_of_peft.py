"""Adapters that peft itself made: in one batch, the greedy texts are those of peft's own model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from cluster.errors import ConfigError
from tests.support.choices import by_day
from tests.support.engine.adapters import ATTENTION, EVERYTHING
from tests.support.engine.driver import (
    Factory,
    GreedyDecoder,
    generate,
    load_engine,
    load_oracle,
    prompt,
)

NUM_PROMPTS = by_day(12, 50)
NUM_TOKENS = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "everything": {"r": 4, "lora_alpha": 16, "target_modules": list(EVERYTHING)},
    "attention": {"r": 3, "lora_alpha": 24, "target_modules": list(ATTENTION)},
    "rslora": {
        "r": 9,
        "lora_alpha": 12,
        "use_rslora": True,
        "target_modules": ["up_proj", "q_proj"],
        "rank_pattern": {"q_proj": 2},
        "layers_to_transform": [0, 2],
    },
}


def make(base: Path, folder: Path, seed: int, *, is_served: bool = True, **settings: Any) -> Path:
    """An adapter with weights drawn by peft, saved by peft."""
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapted = get_peft_model(load_oracle(base), config)
    with torch.no_grad():
        # peft's first weights hardly change a text.
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight *= 3.0
    how = {"save_embedding_layers": False} if is_served else {}
    adapted.save_pretrained(folder, **how)
    return folder


@pytest.fixture(scope="module")
def folders(native_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("peft")
    return {
        name: str(make(native_llama, root / name, seed, **settings))
        for seed, (name, settings) in enumerate(CONFIGS.items())
    }


def test_fifty_greedy_texts_of_three_adapters_in_one_batch_are_those_of_peft(
    native_llama: Path, folders: dict[str, str]
):
    """With and without drafts."""
    prompts = {str(index): prompt(5 + index % 9, seed=index) for index in range(NUM_PROMPTS)}
    chosen = {name: 1 + index % 3 for index, name in enumerate(prompts)}
    models = [
        PeftModel.from_pretrained(load_oracle(native_llama), each).eval()
        for each in folders.values()
    ]
    texts = {
        name: generate(models[chosen[name] - 1], prompts[name], NUM_TOKENS) for name in prompts
    }
    for generator in (None, np.random.default_rng(1)):
        engine = load_engine(native_llama, adapters=folders, num_pages=1024)
        decoder = GreedyDecoder(engine, prompts, NUM_TOKENS, generator, texts, chosen)
        assert decoder.run() == texts
        assert (decoder.num_accepted > 0) == (generator is not None)
    plain = load_oracle(native_llama)
    changed = [texts[name] != generate(plain, prompts[name], NUM_TOKENS) for name in prompts]
    assert np.mean(changed) > 0.8, "the adapters change too little for the test to fail"


def test_an_adapter_of_a_whole_model_serves_the_part_of_its_text(
    checkpoint_factory: Factory, tmp_path: Path
):
    base = checkpoint_factory("mistral3")
    layers = r".*language_model.*\.(q_proj|v_proj|up_proj)"
    folder = make(base, tmp_path / "whole", 0, r=4, lora_alpha=16, target_modules=layers)
    prompts = {"a": prompt(9)}
    adapted = PeftModel.from_pretrained(load_oracle(base), folder).eval()
    texts = {"a": generate(adapted, prompts["a"], NUM_TOKENS)}
    assert texts["a"] != generate(load_oracle(base), prompts["a"], NUM_TOKENS)
    engine = load_engine(base, adapters={"whole": str(folder)})
    assert GreedyDecoder(engine, prompts, NUM_TOKENS, adapters={"a": 1}).run() == texts


def test_embedding_layers_in_a_folder_are_refused_with_the_remedy(
    native_llama: Path, tmp_path: Path
):
    folder = make(native_llama, tmp_path / "whole", 0, is_served=False, **CONFIGS["everything"])
    with pytest.raises(ConfigError, match=r"whole embedding layer.*save_embedding_layers=False"):
        load_engine(native_llama, adapters={"whole": str(folder)})
