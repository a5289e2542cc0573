"""`drafthouse check` refuses a draft head as loading it would, and reads no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config.schema import Config, DrafterConfig, EngineConfig, TargetConfig
from cluster.draft.heads.checkpoint import META, TargetShape, read_tensors
from cluster.draft.heads.load import load_draft_head
from cluster.errors import ConfigError
from deployments.preflight import inspect
from tests.support.draft.heads import random_eagle3, random_medusa
from tests.support.draft.mtp import with_mtp

MAKE = {"eagle3": random_eagle3, "medusa": random_medusa}
SHAPE = TargetShape(48, 288, 3)


def config_of(target: Path, kind: str, options: dict[str, object]) -> Config:
    drafter = DrafterConfig(kind, options)
    return Config(target=TargetConfig(EngineConfig(model=str(target))), drafters={"head": drafter})


def weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("kind", MAKE)
def test_a_head_that_fits_is_passed_without_its_weights(
    kind: str, llama_folder: Path, tmp_path: Path
) -> None:
    head = MAKE[kind](tmp_path, llama_folder)
    inspect(config_of(llama_folder, kind, {"model": str(head)}), is_here=True)
    held = read_tensors(head, device=META).held
    assert all(each.is_meta for name, each in held.items() if name != "d2t")
    assert {name: each.shape for name, each in held.items()} == {
        name: each.shape for name, each in load_file(weights_of(head)).items()
    }


CHANGES = (
    *("tensor lost", "tensor left over", "vocabulary", "map"),
    *("tap", "no taps", "no eagle_config"),
)


def broken(change: str) -> Callable[[Path], None]:
    """What is done to a good EAGLE-3 folder."""

    def change_it(folder: Path) -> None:
        tensors, config = load_file(weights_of(folder)), json.loads(text(folder).read_text())
        if change == "tensor lost":
            del tensors["fc.weight"]
        elif change == "tensor left over":
            tensors["surplus"] = torch.zeros(1)
        elif change == "vocabulary":
            config["vocab_size"] = 299
        elif change == "map":
            tensors["d2t"] = torch.full_like(tensors["d2t"], 280)
        elif change == "tap":
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}
        elif change == "no taps":
            config["eagle_config"] = {"use_aux_hidden_state": False}
        elif change == "no eagle_config":
            config["eagle_config"] = None
        save_file(tensors, weights_of(folder))
        text(folder).write_text(json.dumps(config))

    return change_it


def text(folder: Path) -> Path:
    return folder / "config.json"


@pytest.mark.parametrize("change", CHANGES)
def test_it_says_what_loading_says(change: str, llama_folder: Path, tmp_path: Path) -> None:
    head = random_eagle3(tmp_path, llama_folder)
    broken(change)(head)
    with pytest.raises(ConfigError) as loaded:
        load_draft_head(head, SHAPE, lambda name: torch.zeros(288, 48))
    with pytest.raises(ConfigError) as checked:
        inspect(config_of(llama_folder, "eagle3", {"model": str(head)}), is_here=True)
    assert checked.value.message == f"drafters.head.options.model: {loaded.value.message}"


def test_a_damaged_file_is_told_and_does_not_end_the_check(
    llama_folder: Path, tmp_path: Path
) -> None:
    head = random_eagle3(tmp_path, llama_folder)
    weights_of(head).write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        inspect(config_of(llama_folder, "eagle3", {"model": str(head)}), is_here=True)


def test_a_folder_of_another_kind_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    head = random_medusa(tmp_path, llama_folder)
    with pytest.raises(ConfigError, match="holds no EAGLE-3 head"):
        inspect(config_of(llama_folder, "eagle3", {"model": str(head)}), is_here=True)


def test_an_eagle_4_head_is_refused_before_its_weights_are_read(
    llama_folder: Path, tmp_path: Path
) -> None:
    text(tmp_path).write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle4"]}))
    with pytest.raises(ConfigError, match="it is an EAGLE-4 head, of which neither the format"):
        inspect(config_of(llama_folder, "eagle3", {"model": str(tmp_path)}), is_here=True)


@pytest.mark.parametrize("architecture", ["glm4-moe", "qwen3.5"])
def test_a_prediction_layer_that_the_target_has_not_is_refused(
    architecture: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "mtp", {"model": str(tmp_path)})
    with_mtp(tmp_path, architecture)
    inspect(config, is_here=True)
    with_mtp(tmp_path, architecture, eh_proj__weight=None)
    with pytest.raises(ConfigError, match=r"options\.model: .* no multi-token-prediction layer"):
        inspect(config, is_here=True)


def test_layers_that_the_target_has_not_are_refused(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"options\.exit_layer: 3 is not below the 3 layers"):
        inspect(config_of(llama_folder, "early_exit", {"exit_layer": 3}), is_here=True)
