"""Fixtures that the engine's tests share."""

from __future__ import annotations

import pytest

from cluster.engine.cpu import kernels


@pytest.fixture
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own kernels share their work among several threads, however many torch has here."""
    loaded = kernels.load()
    if loaded is not None:
        monkeypatch.setattr(loaded, "num_threads", 2)
