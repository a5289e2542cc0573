"""The products of our own kernels, in every format of weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cluster.engine.attention.backends import NativeBackend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.models.grouped import GroupedWeight
from tests.support.choices import pairwise
from tests.support.engine.products import KINDS, check_products
from tests.support.engine.triton_cases import (
    DECODING,
    LARGE_TREE,
    MIXED,
    PROMPT,
    RAGGED,
    SCRATCH_SLOT,
    Case,
)
from tests.support.models.grouped_weights import grouped_weight

pytestmark = pytest.mark.usefixtures("several_threads")
BATCHES = {
    "decoding": DECODING,
    "large tree": LARGE_TREE,
    "mixed": MIXED,
    "ragged": RAGGED,
    "prompt": PROMPT,
}


@pairwise(
    kind=KINDS,
    shape=[(1, 1), (7, 63), (64, 64), (129, 200), (300, 130), (576, 64)],
    has_bias=[False, True],
)
def test_products_are_those_of_the_numbers_and_every_row_is_on_its_own(
    kernels: Kernels, kind: str, shape: tuple[int, int], has_bias: bool
):
    check_products(kernels, kind, shape, has_bias=has_bias)


def test_products_in_4_bits_are_torchs(kernels: Kernels):
    """Its weights are scale * (q - 8) + zero, in bfloat16 but for the integers."""
    weight = grouped_weight(64, 128, 4, 32)
    scale, minimum = weight.scale.bfloat16(), weight.minimum.bfloat16()
    weight = GroupedWeight(4, 32, weight.q, scale.half(), minimum.half())
    zero = (minimum.float() + 8.0 * scale.float()).bfloat16()
    zeros = torch.stack([scale.T, zero.T], dim=2).contiguous()
    given = torch.randn(9, 128)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.q.int(), 1)
        expected = torch.ops.aten._weight_int4pack_mm_for_cpu(given.bfloat16(), packed, 32, zeros)
    except (AttributeError, NotImplementedError):
        pytest.skip("this torch has no products in 4 bits on a CPU")
    found = kernels.linear(given, kernels.pack_groups(weight), None, 64, Format.GROUPS)
    assert (found - expected.float()).norm() < 2e-2 * found.norm()


@pairwise(name=BATCHES, head_dim=[16, 32, 64, 80], sharing=[1, 2, 3, 4, 7])
def test_attention_over_keys_in_bfloat16_is_the_references(
    kernels: Kernels, name: str, head_dim: int, sharing: int
):
    if head_dim % kernels.lanes:
        pytest.skip("not a head that the kernel takes")
    case = Case(BATCHES[name], 2 * sharing, 2, head_dim, window=70)
    kv = case.kv().bfloat16().contiguous()
    found, wanted = (
        backend.plan(case.batch, SCRATCH_SLOT).attend(
            case.query(), keys, case.window, case.options()
        )
        for backend, keys in ((NativeBackend(kernels), kv), (SdpaBackend(), kv.float()))
    )
    error = (found - wanted).norm(dim=2) / wanted.norm(dim=2)
    assert float(error.max()) < 2e-2  # the queries' rounding


def test_any_number_of_threads_gives_the_same_bits(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
):
    weight, rows = kernels.pack(torch.randn(1000, 300)), torch.randn(9, 300)
    expected = kernels.linear(rows, weight, None, 1000, Format.FLOAT32)
    for num_threads in (1, 5):
        monkeypatch.setattr(kernels, "num_threads", num_threads)
        assert torch.equal(kernels.linear(rows, weight, None, 1000, Format.FLOAT32), expected)


def test_callers_in_several_threads_do_not_disturb_each_other(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "num_threads", 3)
    weights = [torch.randn(500 + 100 * index, 64) for index in range(4)]
    rows = torch.randn(5, 64)

    def product(weight: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows, kernels.pack(weight), None, len(weight), Format.FLOAT32)

    def is_always(weight: torch.Tensor, expected: torch.Tensor) -> bool:
        return all(torch.equal(product(weight), expected) for _ in range(300))

    expected = list(map(product, weights))
    with ThreadPoolExecutor(len(weights)) as threads:
        assert all(threads.map(is_always, weights, expected))
