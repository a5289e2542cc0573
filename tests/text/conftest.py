"""Tokenizers of both families, built once."""

from pathlib import Path

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.support.text.tokenizers_for_tests import (
    byte_fallback_folder,
    byte_level_folder,
    small_tokenizer,
)

FOLDERS = {"byte_level": byte_level_folder, "byte_fallback": byte_fallback_folder}


@pytest.fixture(scope="session", params=sorted(FOLDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder of each family in turn."""
    return FOLDERS[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return small_tokenizer()
