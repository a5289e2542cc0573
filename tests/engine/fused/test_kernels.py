"""The kernels between a layer's products compute what transformers' modules do.

In float16 to the bit but for sums of another order, which shows that they round where those round;
the interpreter cuts bfloat16 off instead of rounding it.
"""

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

pytest.importorskip("triton", reason="triton is not installed")

from cluster.engine.fused.kernels import add_norm, rotate, silu_product
from tests.support.choices import by_day
from tests.support.engine.interpreter import interpreted

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 4e-2}
DTYPES = by_day([torch.float32, torch.float16], [*TOLERANCES])
EPSILON = 1e-5

pytestmark = [interpreted, pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    if found.dtype == torch.float16:
        assert (found == expected).float().mean() > 0.999


def norm_of(weight: torch.Tensor) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(len(weight), EPSILON)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


@pytest.mark.parametrize("size", [48, 3584, 4096])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_norm_of_a_sum_is_the_norm_and_leaves_the_sum(
    size: int, num_rows: int, dtype: torch.dtype
):
    given, change = (30 * normal(seed, num_rows, size, dtype=dtype) for seed in (1, 2))
    weight = normal(3, size, dtype=dtype)
    norm = norm_of(weight)
    hidden = given.clone()
    check(add_norm(hidden, None, weight, EPSILON), norm(given))
    assert torch.equal(hidden, given)
    wanted = torch.tensor([num_rows - 1, 0, 0])
    expected = norm(given + change)
    check(add_norm(hidden, change, weight, EPSILON, wanted), expected[wanted])
    assert torch.equal(hidden, given)
    check(add_norm(hidden, change.clone(), weight, EPSILON), expected)
    check(hidden, given + change)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 16), (32, 8, 128), (14, 2, 64), (3, 3, 12)], ids=str
)
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
def test_queries_are_rotated_and_keys_and_values_stand_in_their_slots(
    heads: int, kv_heads: int, head_dim: int, has_norms: bool, dtype: torch.dtype
):
    positions, slots = torch.tensor([3, 0, 9]), torch.tensor([12, 1, 0])
    qkv = normal(1, 3, heads + 2 * kv_heads, head_dim, dtype=dtype)
    # Another layer's cache lies before it.
    kv = normal(2, 2, 16, 2, kv_heads, head_dim, dtype=dtype)[1]
    weight = normal(3, 2 * head_dim, dtype=dtype) if has_norms else None
    angles = 6 * torch.rand(10, head_dim // 2, generator=torch.Generator().manual_seed(4))
    rotations = torch.stack((angles.cos(), angles.sin())).to(dtype)

    query, key, value = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
    if weight is not None:
        query, key = norm_of(weight[:head_dim])(query), norm_of(weight[head_dim:])(key)
    cosines, sines = rotations[:, positions].repeat(1, 1, 2)
    query, key = apply_rotary_pos_emb(query, key, cosines, sines)
    expected = kv.clone()
    expected[slots] = torch.stack((key, value), dim=1)

    found = rotate(qkv, kv, positions, slots, rotations, weight, EPSILON)
    check(found.transpose(0, 1), query)
    check(kv, expected)


@pytest.mark.parametrize("size", [96, 1024, 2500])
def test_the_product_of_gates(size: int, dtype: torch.dtype):
    gate_up = 10 * normal(1, 5, 2 * size, dtype=dtype)
    gate, up = gate_up.split(size, dim=1)
    check(silu_product(gate_up), silu(gate) * up)
