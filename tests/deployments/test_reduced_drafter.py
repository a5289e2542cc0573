"""A drafter with fewer tokens than the target is compared with it by what it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.train.chat_drafter import save_drafter, smaller_copy
from deployments.preflight import inspect

DRAFTER = "drafters.lm.options.engine"


def reduced_drafter(target: Path, folder: Path, tokenizer_hash: str) -> Config:
    """A configuration with a drafter that has every second token of the target."""
    ids = np.arange(0, 288, 2, dtype=np.int32)
    vocabulary = DraftVocabulary(ids, np.arange(288, dtype=np.int32) // 2, tokenizer_hash)
    network = AutoModelForCausalLM.from_pretrained(target)
    save_drafter(smaller_copy(network, vocabulary, 1), vocabulary, folder)
    lm = DrafterConfig("lm", {"engine": {"model": str(folder)}})
    return Config(target=TargetConfig(EngineConfig(model=str(target))), drafters={"lm": lm})


def test_a_drafter_made_for_the_target_is_accepted(llama_folder: Path, tmp_path: Path) -> None:
    config = reduced_drafter(llama_folder, tmp_path / "d", folder_tokenizer_hash(llama_folder))
    found = inspect(config, is_here=True)
    assert found[DRAFTER].described.vocab_size == 144


def test_a_drafter_made_for_another_target_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    config = reduced_drafter(llama_folder, tmp_path / "d", "another")
    with pytest.raises(ConfigError, match="made for another one"):
        inspect(config, is_here=True)


def test_a_model_without_its_vocabulary_file_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    config = reduced_drafter(llama_folder, tmp_path / "d", "")
    assert inspect(config, is_here=True)
    bare = shutil.copytree(tmp_path / "d", tmp_path / "bare")
    (bare / "draft_vocabulary.safetensors").unlink()
    lm = DrafterConfig("lm", {"engine": {"model": str(bare)}})
    with pytest.raises(ConfigError, match="144 tokens against 288"):
        inspect(Config(target=config.target, drafters={"lm": lm}), is_here=True)
