"""A small model, and a device of many programs."""

from pathlib import Path

import pytest

from tests.support.engine.driver import Factory
from tests.support.engine.graphs import FEW_LAYERS


@pytest.fixture(scope="session")
def small_llama(checkpoint_factory: Factory) -> Path:
    """Of one layer: the interpreter takes as long for each."""
    return checkpoint_factory("llama", **FEW_LAYERS["llama"])


@pytest.fixture(scope="session")
def two_layers(checkpoint_factory: Factory) -> Path:
    return checkpoint_factory("llama", **FEW_LAYERS["llama"] | {"num_hidden_layers": 2})


@pytest.fixture
def many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that contexts of a few blocks are split."""
    from cluster.engine.attention.triton import backend as triton_attention
    from cluster.engine.attention.triton import layout

    monkeypatch.setattr(triton_attention, "_PROGRAMS_WITHOUT_GPU", 6)
    monkeypatch.setattr(triton_attention, "_MAX_BLOCK_KEYS", 16)
    monkeypatch.setattr(layout, "_MIN_SPLIT_KEYS", 16)
