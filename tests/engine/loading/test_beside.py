"""A model that is loaded while another engine of the process makes steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.model import load_model
from cluster.engine.loading.planned import planned


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_it_is_the_same_model_and_torchs_default_stays(
    architecture: str, checkpoint_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default is one for all threads: what a step makes meanwhile would be of half the size."""
    folder = checkpoint_factory(architecture, dtype=torch.bfloat16)
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", num_pages=16)
    expected = load_model(config).module.state_dict()
    defaults: list[torch.dtype] = []
    set_default = torch.set_default_dtype
    monkeypatch.setattr(
        torch, "set_default_dtype", lambda dtype: (defaults.append(dtype), set_default(dtype))
    )
    planned(folder, describe(folder, config), config, is_here=True)
    found = load_model(config, beside=True).module.state_dict()
    assert set(defaults) <= {torch.float32}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
