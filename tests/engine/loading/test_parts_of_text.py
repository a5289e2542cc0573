"""Of models of images and text the text's part is served, as a causal model of its own."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import check_loadable, describe
from tests.support.architectures import BY_TEXT
from tests.support.engine.altered import altered
from tests.support.engine.driver import Factory, check_text, load_engine, load_oracle, prompt
from tests.support.engine.native import needs_native
from tests.support.errors import config_error

CLASSES = {
    "gemma3-vision": "Gemma3ForCausalLM",
    "gemma4-vision": "Gemma4ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "mistral3-tied": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen3-vl": "Qwen3ForCausalLM",
    "qwen3.5-vision": "Qwen3_5ForCausalLM",
}


def settings(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu")


@pytest.mark.parametrize("architecture", BY_TEXT)
def test_the_part_is_described_and_the_rest_not_loaded(
    architecture: str, checkpoint_factory: Factory
):
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16)
    described = check_loadable(folder, settings(folder), is_here=True)
    assert described.architecture == CLASSES[architecture]
    assert described.text_config.dtype == torch.bfloat16, "which the whole's configuration says"
    engine = load_engine(folder)
    assert engine.model.architecture == CLASSES[architecture]
    whole, part = (
        [name for name, _ in module.named_modules() if "vis" in name]
        for module in (load_oracle(folder), engine.model.module)
    )
    assert whole
    assert not part


@needs_native
@pytest.mark.parametrize("architecture", ["mistral3", "qwen3-vl"])
def test_our_kernels_take_it_as_any_other(architecture: str, checkpoint_factory: Factory):
    assert load_engine(checkpoint_factory(architecture)).model.native is not None


@pytest.mark.parametrize("architecture", ["gemma3-vision", "mistral3-tied"])
def test_a_weight_of_the_part_that_lacks_is_told_before_it_loads(
    architecture: str, checkpoint_factory: Factory, tmp_path: Path
):
    def lose(stored: dict[str, torch.Tensor]) -> None:
        del stored[next(each for each in stored if each.endswith("layers.1.mlp.up_proj.weight"))]

    folder = altered(checkpoint_factory(architecture), tmp_path / "model", change=lose)
    with config_error(r"lacks 1 of the weights.*model\.layers\.1\.mlp\.up"):
        check_loadable(folder, settings(folder), is_here=True)


def test_an_output_layer_that_only_the_weights_tell_of_is_kept(
    checkpoint_factory: Factory, tmp_path: Path
):
    """Configurations of Mistral 3 leave out that it is not tied."""
    folder = checkpoint_factory("mistral3")
    engine = load_engine(altered(folder, tmp_path / "model", {"tie_word_embeddings": True}))
    assert not engine.model.module.all_tied_weights_keys
    check_text(engine, load_oracle(folder), prompt(9), 12)


def test_the_whole_need_not_be_buildable(checkpoint_factory: Factory, tmp_path: Path):
    """Gemma 3n sees by a package of its own, which its text does without."""

    def nest(stored: dict[str, torch.Tensor]) -> None:
        for name in list(stored):
            nested = re.sub(r"^model\.", "model.language_model.", name)
            stored[nested] = stored.pop(name)
        stored["model.vision_tower.x"] = torch.zeros(2)

    source = checkpoint_factory("gemma3n")
    folder = altered(source, tmp_path / "model", change=nest)
    file = folder / "config.json"
    text = json.loads(file.read_text("utf-8"))
    whole = {"model_type": "gemma3n", "text_config": text, "tie_word_embeddings": False}
    file.write_text(json.dumps(whole), "utf-8")
    check_loadable(folder, settings(folder), is_here=True)
    check_text(load_engine(folder), load_oracle(source), prompt(9), 12)


@pytest.mark.parametrize("name", ["InternVLConfig", "Qwen3VLMoeConfig", "Glm4vMoeConfig"])
def test_others_are_refused_by_name(name: str, tmp_path: Path):
    config = getattr(transformers, name)()
    config.save_pretrained(tmp_path)
    with config_error(rf"{name} .*no causal language model for it"):
        describe(tmp_path, settings(tmp_path))
