"""The native kernels: torch's results, a row's bits its own, whoever else calls."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cluster.engine.cpu import kernels as native
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.packed_linear import PackedLinear
from tests.support.choices import by_night

pytestmark = pytest.mark.usefixtures("several_threads")


def test_a_float32_weight_is_kept_as_bfloat16_only_where_that_loses_nothing(
    kernels: Kernels,
):
    exact, other = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    exact.weight.data = exact.weight.data.bfloat16().float()
    assert PackedLinear(exact, kernels).packed.dtype == torch.bfloat16
    assert PackedLinear(other, kernels).packed.dtype == torch.float32
    rows = torch.randn(3, 64)
    packed = kernels.pack(exact.weight.detach().bfloat16())
    expected = kernels.linear(rows, packed, None, 64, Format.BF16)
    assert torch.equal(PackedLinear(exact, kernels)(rows), expected)


@by_night
@pytest.mark.parametrize("options", [[], ["-mavx512f", "-mfma"]], ids=str)
def test_they_compile_for_other_registers_too(options: list[str]):
    """Those of AVX2 are compiled in test_kernels_ahead.py, and run."""
    folder = Path(native.__file__).parent
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("the options are those of g++ for x86")
    for source in folder.glob("*.cpp"):
        command = [compiler, "-std=c++17", "-fsyntax-only", *options, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_they_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "0")
    assert native.load.__wrapped__() is None
