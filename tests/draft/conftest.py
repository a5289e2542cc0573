"""Use one thread: it is fastest for such small tensors and leaves the other cores free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.engine.engine import Engine
from tests.support.draft.author import draft_engine


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def exact_engine(llama_folder: Path) -> Engine:
    """The target's own model."""
    return draft_engine(llama_folder)


@pytest.fixture(scope="session")
def noisy_engine(draft_folder: Path) -> Engine:
    """A model that often agrees with the target."""
    return draft_engine(draft_folder)
