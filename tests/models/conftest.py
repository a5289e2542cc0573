"""A cache of its own for every test, and one tiny GGUF file for all of them."""

from pathlib import Path

import pytest

from tests.support.models.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTHOUSE_MODELS", str(folder))
    return folder


@pytest.fixture(scope="session")
def gguf_file(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama_folder` as a GGUF file."""
    return write_gguf(llama_folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
