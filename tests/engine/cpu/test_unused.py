"""Where a model is on a GPU, nothing compiles what computes on a CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from cluster.config.schema import EngineConfig
from cluster.engine.attention.backends import create_backend
from cluster.engine.cpu import kernels
from cluster.engine.cpu.narrow import can_widen
from cluster.engine.cpu.packed_linear import choose_kernels
from cluster.engine.loading.reproducible import check_reproducible
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError

GPU = torch.device("cuda", 0)


class _CompilerCalled(Exception):
    pass


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise _CompilerCalled

    monkeypatch.setattr(kernels, "load", load)


def _elsewhere() -> torch.nn.Module:
    """A model that is not on the CPU; `meta` is a device that every machine has."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8, device="meta", dtype=torch.bfloat16))


def test_no_weight_is_packed_or_widened_for_a_model_on_a_gpu() -> None:
    layers = [LayerSpec(2, 16, torch.bfloat16, GPU)]

    assert choose_kernels(_elsewhere()) is None
    assert not can_widen(_elsewhere(), EngineConfig(), 2, layers)


def test_attention_on_a_gpu_needs_no_native_kernels() -> None:
    # A machine that has Triton and no GPU refuses, which takes no compiler either.
    with contextlib.suppress(ConfigError):
        assert create_backend("auto", GPU) is not None


def test_a_refusal_of_reproducible_on_a_gpu_needs_none() -> None:
    with pytest.raises(ConfigError, match="device: cpu"):
        check_reproducible(_elsewhere(), EngineConfig(reproducible=True), GPU, None, ())


def test_a_model_on_the_cpu_does_ask_for_them() -> None:
    with pytest.raises(_CompilerCalled):
        choose_kernels(torch.nn.Sequential(torch.nn.Linear(8, 8)))
