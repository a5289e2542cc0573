"""Fixtures that the engine's tests share."""

from __future__ import annotations

import pytest
import torch

from cluster.engine.cpu.kernels import Kernels, load
from tests.support.engine.interpreter import run_python
from tests.support.engine.native import needs_native
from tests.support.engine.triton_cases import INTERPRETED


@pytest.fixture(scope="module", params=["sdpa", pytest.param("native", marks=needs_native)])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Every case's output under Triton's interpreter."""
    path = tmp_path_factory.mktemp("triton") / "outputs.pt"
    run_python("tests.support.engine.triton_process", str(path), *INTERPRETED)
    found: dict[str, torch.Tensor] = torch.load(path)
    return found
