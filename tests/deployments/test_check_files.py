"""`drafthouse check` reads a model's files far enough to refuse what could not be served."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Run
from tests.support.choices import by_day
from tests.support.draft.heads import random_eagle3
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
