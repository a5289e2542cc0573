"""Products with weights in groups of few bits: equal bits by whatever instructions, and never wrong
ones in a model."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import cpp
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.narrow import multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.errors import ConfigError
from tests.support.choices import absent
from tests.support.compiled import SOURCES, ahead, program
from tests.support.engine import groups
from tests.support.models.grouped_weights import grouped_weight

pytestmark = pytest.mark.usefixtures("several_threads")


@pytest.fixture(autouse=True)
def _as_before(kernels: Kernels) -> Iterator[None]:
    yield
    kernels.choose_products(kernels.products)


@pytest.mark.parametrize("products", [each for each in cpp.products() if each != "c"])
def test_products_are_those_of_plain_c_to_the_bit(kernels: Kernels, products: str):
    assert kernels.choose_products(products)
    assert groups.differing(kernels, products) == []


@pytest.fixture(scope="module")
def spelled() -> Kernels:
    """A library in which the instructions that a machine may lack are loops."""
    if shutil.which("g++") is None or "avx2" not in cpp.products():
        pytest.skip("needs g++ and an x86-64 processor with AVX2")
    header = Path(groups.__file__).with_name("spelled.h")
    options = ["-std=c++17", "-O1", "-march=native", "-fPIC", "-shared", "-pthread"]
    spelled = f'-DDRAFTHOUSE_SPELLED="{header}"'
    library = program("g++", *options, spelled, *SOURCES, header=header)
    kernels = Kernels(ctypes.CDLL(str(library)), "spelled")
    kernels.num_threads = 2
    return kernels


@pytest.mark.parametrize("products", ["amx-int8", "avx512-vnni", "avx-vnni"])
def test_products_of_other_x86_processors_are_those_of_plain_c_to_the_bit(
    spelled: Kernels, products: str
):
    assert spelled.choose_products(products)
    assert groups.differing(spelled, products) == []


@pytest.fixture(scope="module")
def on_arm() -> Callable[[str, str], tuple[int, bytes]]:
    """Runs tests/native/groups.cpp on a processor of that name with our libraries for aarch64."""
    compiler, machine = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or machine is None:
        absent("needs g++-aarch64-linux-gnu and qemu-user")
    folders = cpp._folders(Path(cpp.__file__).parent)
    made = [ahead(each, cpp.PROCESSORS, "aarch64") for each in folders]
    libraries = [library for each in made for library in each.glob("ahead/*.so")]
    assert len(libraries) == len(folders) == 3
    native = Path(__file__).parents[2] / "native" / "groups.cpp"
    test = program(compiler, "-std=c++17", "-O2", native, "-ldl")

    def run(processor: str, products: str) -> tuple[int, bytes]:
        emulated = [machine, "-L", "/usr/aarch64-linux-gnu", "-cpu", processor]
        command = [*emulated, test, products, *libraries]
        done = subprocess.run(command, capture_output=True, timeout=900)
        return done.returncode, done.stdout.splitlines()[-1]

    return run


@pytest.mark.parametrize(("processor", "products"), [("max", "dotprod"), ("cortex-a57", "c")])
def test_products_of_arm_are_those_of_plain_c_to_the_bit(
    on_arm: Callable[[str, str], tuple[int, bytes]], processor: str, products: str
):
    """By the libraries of the wheel, also where a processor has no dot products."""
    assert on_arm(processor, products) == (0, b"512 cases, 0 differ")


def test_where_a_product_is_wrong_weights_stay_widened(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
):
    layer = torch.nn.Linear(64, 40, bias=False)
    weight = grouped_weight(40, 64, 4, 32)
    layer.weight.data = weight.dequantized().bfloat16().float()
    module = torch.nn.Sequential(PackedLinear(layer, kernels), PackedLinear(layer, kernels))
    real = Kernels.linear

    def wrong(self: Kernels, *given: Any) -> torch.Tensor:
        return real(self, *given) * (1.1 if given[-1] == Format.GROUPS else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(Kernels, "linear", wrong)
        assert multiply_in_groups(module, kernels, {"0": weight, "1": weight}) == 0
    rows = torch.randn(3, 64)
    torch.testing.assert_close(module[0](rows), layer(rows), atol=1e-4, rtol=1e-4)
    assert multiply_in_groups(module, kernels, {"0": weight, "1": weight}) == 2
    error = (module[0](rows) - layer(rows)).norm() / layer(rows).norm()
    assert 0 < error < 2e-2


def test_a_row_that_holds_no_number_gives_none_and_leaves_the_others(kernels: Kernels):
    weight = kernels.pack_groups(grouped_weight(40, 64, 4, 32))
    rows = torch.randn(4, 64)
    rows[1, 40], rows[2, 3] = float("nan"), float("inf")
    expected = kernels.linear(rows[::3].contiguous(), weight, None, 40, Format.GROUPS)
    for products in cpp.products():
        kernels.choose_products(products)
        found = kernels.linear(rows, weight, None, 40, Format.GROUPS)
        assert not found[1:3].isfinite().any()
        assert torch.equal(found[::3], expected)


def test_the_instructions_can_be_named_and_must_be_there(monkeypatch: pytest.MonkeyPatch):
    assert cpp.products()[-1] == "c"
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "c")
    assert cpp.products() == ("c",)
    monkeypatch.setattr(cpp, "cpu_flags", frozenset)
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "avx2")
    with pytest.raises(ConfigError, match="this processor has no avx2; it has c"):
        cpp.products()
    monkeypatch.delenv("DRAFTHOUSE_NATIVE")
    assert cpp.products() == ("c",)
