"""Fixtures that the engine's tests share."""

from __future__ import annotations

import pytest

from cluster.engine.cpu import kernels

_native = pytest.mark.skipif(kernels.load() is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=["sdpa", pytest.param("native", marks=_native)])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own kernels share their work among several threads, however many torch has here."""
    loaded = kernels.load()
    if loaded is not None:
        monkeypatch.setattr(loaded, "num_threads", 2)
