"""The kernels as an image brings them: compiled ahead for a less able processor than this one."""

import platform
import shutil

import pytest
import torch

from cluster import cpp
from cluster.engine.cpu.kernels import Kernels
from tests.support.compiled import CPU, ahead
from tests.support.engine.products import check_products

(_LEAST,) = (each for each in cpp.PROCESSORS if each.name == "avx2")

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not _LEAST.flags <= cpp.cpu_flags(),
    reason="needs a C++ compiler and an x86-64 processor with AVX2",
)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """Of copied sources, loaded without a compiler on a processor that has AVX2 and no more."""
    folder = ahead(CPU, [_LEAST], platform.machine())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpp, "cpu_flags", lambda: _LEAST.flags)
        patched.setattr(cpp.shutil, "which", lambda name: None)
        loaded = cpp.load(folder)
    assert loaded.build.startswith("avx2-")
    return Kernels(loaded.library, loaded.build)


def test_its_vectors_are_those_of_the_processor(kernels: Kernels):
    assert kernels.lanes == 8
    assert not kernels.multiplies_bf16


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_its_products_are_torchs(kernels: Kernels, kind: str):
    check_products(kernels, kind, (129, 200), has_bias=True)


def test_its_norms_are_torchs(kernels: Kernels):
    rows, weight = torch.randn(5, 96), torch.randn(96)
    plain = torch.nn.functional.rms_norm(rows, (96,), weight, 1e-6)
    torch.testing.assert_close(kernels.rms_norm(rows, weight, 1e-6), plain)
