"""`drafthouse check` reads a model's files far enough to refuse what could not be served."""

import json
import zipfile
from dataclasses import replace
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
from tests.conftest import Run
from tests.support.choices import by_day
from tests.support.draft.heads import random_eagle3, random_medusa
from tests.support.draft.mtp import with_mtp
from tests.support.errors import config_error
from tests.support.models.gguf_files import write_gguf


@pytest.fixture
def refused(check: Run) -> Run:
    """The one line that `check` says of a model and drafters; with `status=0` it finds no fault."""

    def refused(model: Path, status: int = 2, **drafters: Any) -> str:
        said = check(status, model, drafters=drafters)
        if not status:
            return said
        (line,) = said.splitlines()
        assert len(line) < 700
        return line

    return refused


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


VALUES = [
    ("vocab_size", None),
    ("hidden_size", 50),
    ("num_attention_heads", 0),
    ("num_hidden_layers", 1.5),
    ("hidden_act", "nope"),
    ("dtype", "float99"),
    ("dtype", "int8"),
    ("rope_parameters", {"rope_type": "nope"}),
    ("text_config", 5),
    ("model_type", 5),
    ("vocab_size", -5),
    ("vocab_size", "many"),
    ("num_attention_heads", None),
    ("num_key_value_heads", 3),
    ("num_hidden_layers", -1),
    ("head_dim", 0),
    ("head_dim", True),
    ("max_position_embeddings", None),
    ("intermediate_size", "x"),
    ("rms_norm_eps", None),
    ("rope_parameters", 5),
    ("rope_parameters", {"rope_type": "default", "rope_theta": None}),
    ("pad_token_id", 10**9),
    ("quantization_config", 5),
    ("eos_token_id", "x"),
]


@pytest.mark.parametrize(("key", "value"), by_day(VALUES[:10], VALUES))
def test_a_value_that_no_model_has_is_told_with_its_key(
    key: str, value: Any, model: Path, refused: Run
):
    change(model, **{key: value})
    line = refused(model)
    assert f"target.engine.model: {model}/config.json: " in line
    assert key in line.partition("config.json: ")[2]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("vocab_size", 300, "config.json: vocab_size: by it "),
        ("intermediate_size", 72, "config.json: intermediate_size: by it "),
        ("num_hidden_layers", 20, "of the weights that its config.json describes"),
    ],
)
def test_a_size_that_the_weights_have_not_is_told(
    key: str, value: int, told: str, model: Path, refused: Run
):
    change(model, **{key: value})
    assert told in refused(model)


def test_a_draft_models_and_a_draft_heads_bad_values_are_told_as_well(
    model: Path, llama_folder: Path, tmp_path: Path, refused: Run
):
    change(model, num_attention_heads=0)
    drafter = {"kind": "lm", "options": {"engine": {"model": str(model), "device": "cpu"}}}
    assert "drafters.lm.options.engine.model: " in refused(llama_folder, lm=drafter)
    head = random_eagle3(tmp_path, llama_folder)
    change(head, hidden_size=50)
    own = {"kind": "eagle3", "options": {"model": str(head)}}
    assert "config.json: hidden_size: " in refused(llama_folder, head=own)


def cut(file: Path, num_bytes: int) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[:-num_bytes] if num_bytes > 0 else data + bytes(-num_bytes))
    return file


@pytest.mark.parametrize("num_bytes", [1, 10**5, -16])
def test_weights_of_another_length_than_their_header_says_are_damaged(
    num_bytes: int, model: Path, refused: Run
):
    file = cut(model / "model.safetensors", num_bytes)
    assert f"target.engine.model: {file} is damaged (" in refused(model)


@pytest.mark.parametrize("data", [b"abc", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_weights_without_a_header_are_damaged(data: bytes, model: Path, refused: Run):
    (model / "model.safetensors").write_bytes(data)
    assert "model.safetensors is damaged (its header" in refused(model)


def test_a_cut_part_of_weights_in_parts_is_damaged(model: Path, refused: Run):
    whole = model / "model.safetensors"
    names = dict.fromkeys(load_file(whole), "part-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    whole.rename(model / "part-1.safetensors")
    refused(model, status=0)
    cut(model / "part-1.safetensors", 64)
    assert "part-1.safetensors is damaged" in refused(model)


@pytest.mark.parametrize("weight_map", [{}, {"a": 5}, []])
def test_an_index_that_names_no_files_is_damaged(weight_map: object, model: Path, refused: Run):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "index.json is damaged" in refused(model)


def test_cut_weights_of_pytorch_are_damaged(model: Path, refused: Run):
    file = model / "pytorch_model.bin"
    torch.save(load_file(model / "model.safetensors"), file)
    (model / "model.safetensors").unlink()
    assert zipfile.is_zipfile(file)
    refused(model, status=0)
    cut(file, 4096)
    assert f"{file} is damaged (" in refused(model)


@pytest.mark.usefixtures("no_models")
def test_a_cut_gguf_file_is_refused_before_it_is_converted(
    llama_folder: Path, tmp_path: Path, refused: Run
):
    for num_bytes in (1, 4096, 10**5):
        file = write_gguf(llama_folder, tmp_path / "tiny.gguf")
        cut(file, num_bytes)
        assert f"target.engine.model: {file} is cut or is no GGUF file" in refused(file)
    refused(write_gguf(llama_folder, tmp_path / "tiny.gguf"), status=0)


# A drafter is refused as loading it would refuse it, and no weights are read.
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
    held = read_tensors(head, str, replace(TARGET, device=META)).held
    assert all(each.is_meta for name, each in held.items() if name != "d2t")
    assert {name: each.shape for name, each in held.items()} == {
        name: each.shape for name, each in load_file(weights_of(head)).items()
    }


TAPS = "eagle_config"
# What is done to the tensors and the configuration of a good EAGLE-3 folder.
CHANGES = {
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
        with config_error(told):
            inspected(llama_folder, "eagle3", model=str(folder))


@pytest.mark.parametrize("architecture", ["glm4-moe", "qwen3.5"])
def test_a_prediction_layer_that_the_target_has_not_is_refused(architecture: str, tmp_path: Path):
    with_mtp(tmp_path, architecture)
    inspected(tmp_path, "mtp", model=str(tmp_path))
    with_mtp(tmp_path, architecture, eh_proj__weight=None)
    with config_error(r"options\.model: .* no multi-token-prediction layer"):
        inspected(tmp_path, "mtp", model=str(tmp_path))


def test_layers_that_the_target_has_not_are_refused(llama_folder: Path):
    with config_error(r"options\.exit_layer: 3 is not below the 3 layers"):
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
    with config_error("made for another one"):
        reduced(llama_folder, tmp_path / "other", "another")
    (folder / "draft_vocabulary.safetensors").unlink()
    with config_error("144 tokens against 288"):
        inspected(llama_folder, "lm", engine={"model": str(folder)})
