"""Fixtures that the engine's tests share."""

from pathlib import Path

import pytest

from cluster.engine.cpu.kernels import Kernels, load
from tests.support.engine.driver import Factory


@pytest.fixture(scope="session")
def native_llama(checkpoint_factory: Factory) -> Path:
    """Its layers are ones that native code computes."""
    return checkpoint_factory("llama", head_dim=16)


@pytest.fixture
def kernels() -> Kernels:
    loaded = load()
    if loaded is None:
        pytest.skip("needs a C++ compiler")
    return loaded


@pytest.fixture
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own kernels share their work among several threads, however many torch has here."""
    loaded = load()
    if loaded is not None:
        monkeypatch.setattr(loaded, "num_threads", 2)
