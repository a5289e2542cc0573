"""Engines that draft, loaded once."""

from pathlib import Path

import pytest

from cluster.engine.engine import Engine
from tests.support.draft.author import draft_engine


@pytest.fixture(scope="session")
def exact_engine(llama_folder: Path) -> Engine:
    """The target's own model."""
    return draft_engine(llama_folder)


@pytest.fixture(scope="session")
def noisy_engine(draft_folder: Path) -> Engine:
    """A model that often agrees with the target."""
    return draft_engine(draft_folder)
