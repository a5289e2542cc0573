"""The native kernels: torch's results, a row's bits its own, whoever else calls."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRMSNorm, SiblingLinear, fuse_layers
from cluster.engine.cpu.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.usefixtures("several_threads")


def test_a_float32_weight_is_kept_as_bfloat16_only_where_that_loses_nothing(
    kernels: Kernels,
) -> None:
    exact, other = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    exact.weight.data = exact.weight.data.bfloat16().float()
    assert PackedLinear(exact, kernels).packed.dtype == torch.bfloat16
    assert PackedLinear(other, kernels).packed.dtype == torch.float32
    rows = torch.randn(3, 64)
    packed = kernels.pack(exact.weight.detach().bfloat16())
    expected = kernels.linear(rows, packed, None, 64, Format.BF16)
    assert torch.equal(PackedLinear(exact, kernels)(rows), expected)


class PlainRMSNorm(torch.nn.Module):
    """As most models write it; `offset` 1 as Gemma does."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scaled = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * scaled


class MLP(torch.nn.Module):
    def __init__(self, activation: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(24, 56, bias=False)
        self.up_proj = torch.nn.Linear(24, 56, bias=False)
        self.down_proj = torch.nn.Linear(56, 24, bias=False)
        self.act_fn = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(torch.nn.Module):
    def __init__(self, offset: float, activation: torch.nn.Module) -> None:
        super().__init__()
        self.norm: Any = PlainRMSNorm(24, offset)
        self.q_proj: Any = torch.nn.Linear(24, 40)
        self.k_proj: Any = torch.nn.Linear(24, 16)
        self.v_proj: Any = torch.nn.Linear(24, 16)
        self.mlp: Any = MLP(activation)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.norm(rows)
        parts = (self.q_proj(rows), self.k_proj(rows), self.v_proj(rows), self.mlp(rows))
        return torch.cat(parts, dim=-1)


def test_what_is_fused_computes_the_same(kernels: Kernels) -> None:
    torch.manual_seed(2)
    layer = Layer(0.0, torch.nn.SiLU())
    rows = torch.randn(1, 9, 24) * 3
    with torch.inference_mode():
        expected = layer(rows)
        assert fuse_layers(torch.nn.ModuleList([layer]), kernels) == 3
        assert isinstance(layer.norm, NativeRMSNorm)
        assert isinstance(layer.mlp, NativeMLP)
        assert isinstance(layer.k_proj, SiblingLinear)
        assert pack_linears(layer, kernels) == 0
        torch.testing.assert_close(layer(rows), expected, atol=1e-5, rtol=1e-5)
        # A row alone is the same to the bit.
        assert torch.equal(layer(rows[:, 4:5]), layer(rows)[:, 4:5])


def test_unusual_variants_stay_as_they_are(kernels: Kernels) -> None:
    layer = Layer(1.0, torch.nn.GELU())
    fuse_layers(torch.nn.ModuleList([layer]), kernels)
    assert isinstance(layer.norm, PlainRMSNorm)
    assert isinstance(layer.mlp, MLP)


def test_siblings_notice_another_input_and_a_changed_one(kernels: Kernels) -> None:
    layer = Layer(0.0, torch.nn.SiLU())
    plain = {name: getattr(layer, name) for name in ("q_proj", "k_proj", "v_proj")}
    fuse_layers(torch.nn.ModuleList([layer]), kernels)

    def check(name: str, rows: torch.Tensor) -> None:
        expected = plain[name](rows)
        torch.testing.assert_close(getattr(layer, name)(rows), expected, atol=1e-5, rtol=1e-5)

    with torch.no_grad():
        first, second = torch.randn(2, 24), torch.randn(2, 24)
        for name, rows in (("q_proj", first), ("k_proj", second), ("v_proj", first)):
            check(name, rows)
        check("q_proj", first)
        first += 1.0
        check("k_proj", first)
        check("k_proj", first)


@pytest.mark.parametrize("options", [[], ["-mavx512f", "-mfma"]], ids=str)
def test_they_compile_for_narrower_registers_too(options: list[str]) -> None:
    """Those of AVX2 are compiled in test_kernels_ahead.py, and run."""
    folder = Path(native.__file__).parent
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("the options are those of g++ for x86")
    for source in folder.glob("*.cpp"):
        command = [compiler, "-std=c++17", "-fsyntax-only", *options, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_a_norm_of_another_dtype_is_computed_in_float32(kernels: Kernels) -> None:
    norm = NativeRMSNorm(kernels, torch.nn.Parameter(torch.randn(24), False), 1e-6)
    rows = torch.randn(3, 24).bfloat16()
    found = norm(rows)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, norm(rows.float()).bfloat16())


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "0")
    assert native.load.__wrapped__() is None
