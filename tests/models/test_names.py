"""What the text of a `model` key is taken for."""

import shutil
from pathlib import Path

import pytest

from cluster.models import names
from cluster.models.names import (
    KNOWN,
    FolderSource,
    GgufSource,
    HubSource,
    WheelSource,
    served_name,
    source_of,
)
from cluster.models.resolve import absolute
from tests.support.errors import config_error


def test_a_folder_is_found_below_the_working_directory_and_the_repository(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(llama_folder.parent)
    assert source_of(llama_folder.name) == FolderSource(llama_folder)
    assert source_of(str(llama_folder)) == FolderSource(llama_folder)
    repository = tmp_path / "repository"
    shutil.copytree(llama_folder, repository / "models" / "tiny")
    monkeypatch.setattr(names, "REPOSITORY", repository)
    assert source_of("models/tiny") == FolderSource(repository / "models" / "tiny")


def test_a_shipped_model_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert source_of("models/demo-target") == source_of("demo-target")


def test_a_gguf_file_is_one_by_its_ending(gguf_file: Path):
    assert source_of(str(gguf_file)) == GgufSource(gguf_file)


def test_a_hub_model_may_name_its_revision():
    assert source_of("some-org/Some.Model") == HubSource("some-org/Some.Model")
    assert source_of("some-org/model@v1.0") == HubSource("some-org/model", "v1.0")


def test_a_folder_goes_before_a_name_of_the_catalogue(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert isinstance(source_of("smollm2-135m-instruct"), WheelSource)
    shutil.copytree(llama_folder, tmp_path / "smollm2-135m-instruct")
    monkeypatch.chdir(tmp_path)
    assert isinstance(source_of("smollm2-135m-instruct"), FolderSource)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is empty"),
        ("./nowhere", "no such folder"),
        ("/no/such/place", "no such folder"),
        ("models/a/b", "no such folder"),
        ("models/demo-targte", "no such folder"),
        ("org/file.gguf", "no such folder or file"),
        ("gpt2", "drafthouse models"),
        ("SmolLM2-135M-Instuct", r"did you mean smollm2-135m-instruct\?"),
        ("org/model@", "no such folder"),
        ("../no-such-place", "no such folder"),
        ("org/..", "no such folder"),
        ("org/model@../../etc", "no such folder"),
        ("org/model\0", "no such folder"),
    ],
)
def test_what_is_none_of_these_is_named_with_the_remedy(name: str, message: str):
    with config_error(message) as caught:
        source_of(name)
    assert not name or repr(name) in caught.value.message


def test_a_folder_that_is_no_model_is_named(tmp_path: Path):
    with config_error(r"has no config\.json"):
        source_of(str(tmp_path))


def test_only_paths_are_made_absolute(
    llama_folder: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(llama_folder.parent)
    assert absolute(llama_folder.name) == str(llama_folder)
    assert absolute(str(gguf_file)) == str(gguf_file)
    for name in ("smollm2-135m-instruct", "org/model@main", "/no/such/place"):
        assert absolute(name) == name


def test_a_model_is_served_by_the_name_its_users_know(
    llama_folder: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(llama_folder.parent)
    # Relative on the command line, absolute in replicas: one name.
    assert served_name(llama_folder.name) == served_name(str(llama_folder)) == llama_folder.name
    assert served_name(str(gguf_file)) == "tiny"
    assert served_name("org/model@v2") == "org/model"
    assert served_name("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert served_name("/no/such/place") == "/no/such/place"


def test_every_entry_of_the_catalogue_is_pinned_and_licensed():
    for name, model in KNOWN.items():
        assert name == model.name == name.lower()
        assert model.licence
        match model.source:
            case FolderSource(path):
                assert (path / "config.json").is_file()
            case HubSource(_, revision):
                assert len(revision) == 40
            case WheelSource(requirement, _, num_bytes, sha256):
                assert "==" in requirement
                assert num_bytes == model.num_bytes
                assert len(sha256) == 64
