"""Products of groups by two sets of instructions: where they differ in a bit."""

from itertools import product

import torch

from cluster.engine.cpu.kernels import Format, Kernels
from tests.support.models.grouped_weights import grouped_weight

_SHAPES = ((7, 16), (40, 64), (16, 144), (33, 576), (5, 1536))  # outputs and inputs
_ROW_COUNTS = (*range(1, 18), 31, 63, 64, 65, 70)


def differing(kernels: Kernels, products: str) -> list[str]:
    """Cases in which these products, and those in plain C, are not the same bits: all formats, 1 to
    70 rows of all sizes, extreme weights, inputs and scales."""
    torch.manual_seed(0)
    found: list[str] = []
    for bits, group, has_minimum in product((4, 8), (16, 32), (True, False)):
        for outputs, inputs in _SHAPES:
            if inputs % group:
                continue
            weight = grouped_weight(outputs, inputs, bits, group, has_minimum=has_minimum)
            weight.q[1], weight.q[2] = (15, 0) if bits == 4 else (-128, 127)
            weight.scale[3], weight.scale[4] = 65504.0, 6e-8  # float16's greatest and least
            packed, bias = kernels.pack_groups(weight), torch.randn(outputs)
            rows = _rows(inputs)
            kernels.choose_products("c")
            expected = kernels.linear(rows, packed, bias, outputs, Format.GROUPS)
            assert expected.isfinite().all()
            kernels.choose_products(products)
            for count in _ROW_COUNTS:
                given = rows[:count].contiguous()
                got = kernels.linear(given, packed, bias, outputs, Format.GROUPS)
                if not torch.equal(got.view(torch.int32), expected[:count].view(torch.int32)):
                    name = f"{bits} bits in {group}s, minimum {has_minimum}"
                    found.append(f"{name}, {outputs} x {inputs}, {count} rows")
    return found


def _rows(inputs: int) -> torch.Tensor:
    rows = torch.randn(70, inputs) * torch.logspace(-6, 6, 70)[:, None]
    rows[3], rows[4], rows[5] = 0.0, 1.0, -1.0
    rows[6] = rows[6].sign() * 5.0  # whose sums are as great as they can be
    rows[7, :16], rows[8] = 1e-35, 1e-31  # of no size; and of all but none
    rows[9] = torch.arange(inputs) % 255 - 127.0
    rows[10] = rows[9] + 0.5  # between two integers
    return rows
