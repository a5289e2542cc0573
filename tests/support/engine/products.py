"""Products of our own kernels with weights of every format: those of the numbers that they mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from cluster.engine.cpu.kernels import Format, Kernels
from tests.support.models.grouped_weights import grouped_weight

NUM_ROWS = 130
Packed = tuple[torch.Tensor, torch.Tensor, Format]  # the weights, what they mean, their format


def _plain(dtype: torch.dtype, form: Format, kernels: Kernels, outputs: int, inputs: int) -> Packed:
    weight = torch.randn(outputs, inputs).to(dtype)
    return kernels.pack(weight), weight, form


def _int8(kernels: Kernels, outputs: int, inputs: int) -> Packed:
    integers = torch.randint(-127, 128, (outputs, inputs)).double()
    integers[:, 0] = 127  # which its row's scale is measured by
    weight = (integers * 2.0 ** torch.randint(-6, 2, (outputs, 1)).double()).bfloat16()
    return kernels.pack_int8(kernels.pack(weight)), weight, Format.INT8_PRODUCTS


def _grouped(
    bits: int, group: int, has_minimum: bool, kernels: Kernels, outputs: int, inputs: int
) -> Packed:
    whole = -(-inputs // 128) * 128
    weight = grouped_weight(outputs, whole, bits, group, has_minimum=has_minimum)
    return kernels.pack_grouped(weight), weight.dequantized(), Format.GROUPED


KINDS: dict[str, Callable[[Kernels, int, int], Packed]] = {
    "float32": partial(_plain, torch.float32, Format.FLOAT32),
    "bfloat16": partial(_plain, torch.bfloat16, Format.BF16),
    "rounded": partial(_plain, torch.bfloat16, Format.BF16_PRODUCTS),
    "int8": _int8,
    **{
        f"{bits} bits in {group}s{' with a minimum' * has_minimum}": partial(
            _grouped, bits, group, has_minimum
        )
        for bits, group, has_minimum in (
            (4, 32, True),
            (4, 32, False),
            (8, 32, False),
            (8, 16, True),
            (4, 16, True),
            (4, 128, True),
        )
    },
}


def check_products(kernels: Kernels, kind: str, shape: tuple[int, int], *, has_bias: bool) -> None:
    """shape: inputs and outputs.  Every row is on its own, to the bit, however many there are."""
    torch.manual_seed(1)
    packed, weight, form = KINDS[kind](kernels, shape[1], shape[0])
    outputs, inputs = weight.shape
    bias = torch.randn(outputs) if has_bias else None
    given = torch.randn(NUM_ROWS, inputs)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows, packed, bias, outputs, form)

    together = product(given)
    rounded = given if form in (Format.FLOAT32, Format.BF16) else given.bfloat16()
    expected = torch.nn.functional.linear(
        rounded.double(), weight.double(), None if bias is None else bias.double()
    )
    atol = 1e-2 if kind == "int8" else 1e-4
    torch.testing.assert_close(together.double(), expected, atol=atol, rtol=1e-5)
    # In the processor's tiles, where it has them: of 16 rows, of 32, or of fewer.
    for count in (*range(65), 96, 97, 99, 129):
        assert torch.equal(
            product(given[-count:] if count else given[:0]),
            together[-count:] if count else together[:0],
        ), count
    order = torch.randperm(NUM_ROWS)
    assert torch.equal(product(given[order]), together[order])
    shaped = product(given.view(2, -1, inputs))
    assert torch.equal(shaped.view(-1, outputs), together)
