"""`drafthouse check` refuses a drafter as loading it would, and reads no weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.draft.heads.checkpoint import META, HeadTarget, read_tensors
from cluster.draft.heads.load import load_draft_head
from cluster.draft.vocabulary import DraftVocabulary
from cluster.errors import ConfigError
from cluster.models.fingerprint import folder_tokenizer_hash
from cluster.models.made_for import MadeFor
from cluster.train.chat_drafter import DraftModelLearner, smaller_copy
from deployments.preflight import inspect
from tests.support.draft.heads import random_eagle3, random_medusa
from tests.support.draft.mtp import with_mtp

MAKE = {"eagle3": random_eagle3, "medusa": random_medusa}
TARGET = HeadTarget(48, 288, 3, lambda name: torch.zeros(288, 48))


def inspected(target: Path, kind: str, **options: object) -> Any:
    """What is found of a target with one drafter."""
    drafter = DrafterConfig(kind, options)
    config = Config(
        target=TargetConfig(EngineConfig(model=str(target))), drafters={"head": drafter}
    )
    return inspect(config, is_here=True)


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("kind", MAKE)
def test_a_head_that_fits_is_passed_without_its_weights(
    kind: str, llama_folder: Path, tmp_path: Path
):
    head = MAKE[kind](tmp_path, llama_folder)
    inspected(llama_folder, kind, model=str(head))
    held = read_tensors(head, device=META).held
    assert all(each.is_meta for name, each in held.items() if name != "d2t")
    assert {name: each.shape for name, each in held.items()} == {
        name: each.shape for name, each in load_file(weights_of(head)).items()
    }


TAPS = "eagle_config"
# What is done to the tensors and the configuration of a good EAGLE-3 folder.
CHANGES: dict[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], object]] = {
    "tensor lost": lambda tensors, _: tensors.pop("fc.weight"),
    "tensor left over": lambda tensors, _: tensors.update(surplus=torch.zeros(1)),
    "vocabulary": lambda _, config: config.update(vocab_size=299),
    "map": lambda tensors, _: tensors["d2t"].fill_(280),
    "tap": lambda _, config: config.update(
        {TAPS: {"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}}
    ),
    "no taps": lambda _, config: config.update({TAPS: {"use_aux_hidden_state": False}}),
    "no eagle_config": lambda _, config: config.update({TAPS: None}),
}


def described(folder: Path) -> Path:
    return folder / "config.json"


@pytest.mark.parametrize("change", CHANGES)
def test_it_says_what_loading_says(change: str, llama_folder: Path, tmp_path: Path):
    head = random_eagle3(tmp_path, llama_folder)
    tensors, config = load_file(weights_of(head)), json.loads(described(head).read_text())
    CHANGES[change](tensors, config)
    save_file(tensors, weights_of(head))
    described(head).write_text(json.dumps(config))
    with pytest.raises(ConfigError) as loaded:
        load_draft_head(head, TARGET)
    with pytest.raises(ConfigError) as checked:
        inspected(llama_folder, "eagle3", model=str(head))
    assert checked.value.message == f"drafters.head.options.model: {loaded.value.message}"


def test_a_folder_that_is_damaged_or_of_another_kind_is_refused(llama_folder: Path, tmp_path: Path):
    damaged, medusa, fourth = (tmp_path / name for name in ("damaged", "medusa", "fourth"))
    for folder in (damaged, medusa, fourth):
        folder.mkdir()
    weights_of(random_eagle3(damaged, llama_folder)).write_bytes(b"no weights")
    random_medusa(medusa, llama_folder)
    described(fourth).write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle4"]}))
    for folder, told in (
        (damaged, r"model\.safetensors is damaged"),
        (medusa, "holds no EAGLE-3 head"),
        (fourth, "it is an EAGLE-4 head, of which neither the format"),
    ):
        with pytest.raises(ConfigError, match=told):
            inspected(llama_folder, "eagle3", model=str(folder))


@pytest.mark.parametrize("architecture", ["glm4-moe", "qwen3.5"])
def test_a_prediction_layer_that_the_target_has_not_is_refused(architecture: str, tmp_path: Path):
    with_mtp(tmp_path, architecture)
    inspected(tmp_path, "mtp", model=str(tmp_path))
    with_mtp(tmp_path, architecture, eh_proj__weight=None)
    with pytest.raises(ConfigError, match=r"options\.model: .* no multi-token-prediction layer"):
        inspected(tmp_path, "mtp", model=str(tmp_path))


def test_layers_that_the_target_has_not_are_refused(llama_folder: Path):
    with pytest.raises(ConfigError, match=r"options\.exit_layer: 3 is not below the 3 layers"):
        inspected(llama_folder, "early_exit", exit_layer=3)


def reduced(target: Path, folder: Path, tokenizer_hash: str) -> Any:
    """What is found with a drafter that has every second token of the target."""
    ids = np.arange(0, 288, 2, dtype=np.int32)
    vocabulary = DraftVocabulary(ids, np.arange(288, dtype=np.int32) // 2, tokenizer_hash)
    network = AutoModelForCausalLM.from_pretrained(target)
    DraftModelLearner(smaller_copy(network, vocabulary, 1), vocabulary).save(folder, MadeFor())
    return inspected(target, "lm", engine={"model": str(folder)})


def test_a_drafter_with_fewer_tokens_is_compared_by_what_it_was_made_for(
    llama_folder: Path, tmp_path: Path
):
    own, folder = folder_tokenizer_hash(llama_folder), tmp_path / "own"
    found = reduced(llama_folder, folder, own)
    assert found["drafters.head.options.engine"].described.vocab_size == 144
    with pytest.raises(ConfigError, match="made for another one"):
        reduced(llama_folder, tmp_path / "other", "another")
    (folder / "draft_vocabulary.safetensors").unlink()
    with pytest.raises(ConfigError, match="144 tokens against 288"):
        inspected(llama_folder, "lm", engine={"model": str(folder)})
