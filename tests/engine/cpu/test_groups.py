"""Products with weights in groups of few bits: equal bits by whatever instructions, and never wrong
ones in a model."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster import cpp
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.narrow import multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.products import products_here
from tests.support.choices import absent
from tests.support.compiled import SOURCES, ahead, program
from tests.support.errors import config_error
from tests.support.models.grouped_weights import grouped_weight

pytestmark = pytest.mark.usefixtures("several_threads")

TESTS = Path(__file__).parents[2]
SHAPES = ((7, 16), (40, 64), (16, 144), (33, 576), (5, 1536))  # outputs and inputs
ROW_COUNTS = (*range(1, 18), 31, 63, 64, 65, 70)


def differing(kernels: Kernels, products: str) -> list[str]:
    """Cases in which these products, and those in plain C, are not the same bits: all formats, 1 to
    70 rows of all sizes, extreme weights, inputs and scales."""
    torch.manual_seed(0)
    found = []
    for bits, group, has_minimum in product((4, 8), (16, 32), (True, False)):
        for outputs, inputs in SHAPES:
            if inputs % group:
                continue
            weight = grouped_weight(outputs, inputs, bits, group, has_minimum=has_minimum)
            weight.q[1], weight.q[2] = (15, 0) if bits == 4 else (-128, 127)
            weight.scale[3], weight.scale[4] = 65504.0, 6e-8  # float16's greatest and least
            packed, bias = kernels.pack_groups(weight), torch.randn(outputs)
            rows = varied_rows(inputs)
            kernels.choose_products("c")
            expected = kernels.linear(rows, packed, bias, outputs, Format.GROUPS)
            assert expected.isfinite().all()
            kernels.choose_products(products)
            for count in ROW_COUNTS:
                given = rows[:count].contiguous()
                got = kernels.linear(given, packed, bias, outputs, Format.GROUPS)
                if not torch.equal(got.view(torch.int32), expected[:count].view(torch.int32)):
                    name = f"{bits} bits in {group}s, minimum {has_minimum}"
                    found.append(f"{name}, {outputs} x {inputs}, {count} rows")
    return found


def varied_rows(inputs: int) -> torch.Tensor:
    rows = torch.randn(70, inputs) * torch.logspace(-6, 6, 70)[:, None]
    rows[3], rows[4], rows[5] = 0.0, 1.0, -1.0
    rows[6] = rows[6].sign() * 5.0  # whose sums are as great as they can be
    rows[7, :16], rows[8] = 1e-35, 1e-31  # of no size; and of all but none
    rows[9] = torch.arange(inputs) % 255 - 127.0
    rows[10] = rows[9] + 0.5  # between two integers
    return rows


@pytest.fixture(autouse=True)
def _as_before(kernels: Kernels) -> Iterator[None]:
    yield
    kernels.choose_products(kernels.products)


@pytest.mark.parametrize("products", [each for each in products_here() if each != "c"])
def test_products_are_those_of_plain_c_to_the_bit(kernels: Kernels, products: str):
    assert kernels.choose_products(products)
    assert differing(kernels, products) == []


@pytest.fixture(scope="module")
def spelled() -> Kernels:
    """A library in which the instructions that a machine may lack are loops."""
    if shutil.which("g++") is None or "avx2" not in products_here():
        pytest.skip("needs g++ and an x86-64 processor with AVX2")
    header = TESTS / "support" / "engine" / "spelled.h"
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
    assert differing(spelled, products) == []


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
    test = program(compiler, "-std=c++17", "-O2", TESTS / "native" / "groups.cpp", "-ldl")

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
    for products in products_here():
        kernels.choose_products(products)
        found = kernels.linear(rows, weight, None, 40, Format.GROUPS)
        assert not found[1:3].isfinite().any()
        assert torch.equal(found[::3], expected)


def test_the_instructions_can_be_named_and_must_be_there(monkeypatch: pytest.MonkeyPatch):
    assert products_here()[-1] == "c"
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "c")
    assert products_here() == ("c",)
    monkeypatch.setattr("cluster.engine.cpu.products.cpu_flags", frozenset)
    monkeypatch.setenv("DRAFTHOUSE_NATIVE", "avx2")
    with config_error("this processor has no avx2; it has c"):
        products_here()
    monkeypatch.delenv("DRAFTHOUSE_NATIVE")
    assert products_here() == ("c",)
