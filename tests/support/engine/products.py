"""Products of our own kernels with weights of every format: those of the numbers that they mean."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeGuard

import torch

from cluster.engine.cpu.kernels import Format, Kernels
from tests.support.models.grouped_weights import grouped_weight

NUM_ROWS = 130
Packed = tuple[torch.Tensor, torch.Tensor, Format]  # the weights, what they mean, their format


def _plain(dtype: torch.dtype, form: Format, kernels: Kernels, outputs: int, inputs: int) -> Packed:
    weight = torch.randn(outputs, inputs).to(dtype)
    return kernels.pack(weight), weight, form


def _grouped(
    bits: int, group: int, has_minimum: bool, kernels: Kernels, outputs: int, inputs: int
) -> Packed:
    whole = -(-inputs // group) * group
    weight = grouped_weight(outputs, whole, bits, group, has_minimum=has_minimum)
    return kernels.pack_groups(weight), weight.dequantized(), Format.GROUPS


KINDS = {
    "float32": partial(_plain, torch.float32, Format.FLOAT32),
    "bfloat16": partial(_plain, torch.bfloat16, Format.BF16),
    "rounded": partial(_plain, torch.bfloat16, Format.BF16_PRODUCTS),
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
            (8, 16, False),
        )
    },
}


def in_eight_bits(rows: torch.Tensor) -> torch.Tensor:
    """What products of groups take rows for, float64: integers times a scale for each 32 inputs."""
    missing = -rows.shape[1] % 32
    units = torch.nn.functional.pad(rows, (0, missing)).view(len(rows), -1, 32)
    most = units.abs().amax(dim=2, keepdim=True)
    integers = torch.where(most > 0, units * (torch.tensor(127.0) / most), 0.0).round().double()
    return (integers * (most / 127.0)).flatten(1)[:, : rows.shape[1]]


def in_few_bits(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """True for a linear layer, but for what says how much an expert counts: that stays wide."""
    return isinstance(layer, torch.nn.Linear) and layer.out_features > 1


@contextmanager
def rounding_rows(module: torch.nn.Module) -> Iterator[None]:
    """Inside the context a model's linear layers take their rows as products of groups do."""

    def rounded(_: torch.nn.Module, rows: tuple[torch.Tensor]) -> torch.Tensor:
        return in_eight_bits(rows[0].flatten(0, -2)).view_as(rows[0]).to(rows[0].dtype)

    with ExitStack() as hooks:
        for layer in module.modules():
            if in_few_bits(layer):
                hooks.enter_context(layer.register_forward_pre_hook(rounded))
        yield


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
    rounded = {Format.BF16_PRODUCTS: given.bfloat16(), Format.GROUPS: in_eight_bits(given)}
    expected = torch.nn.functional.linear(
        rounded.get(form, given).double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(together.double(), expected, atol=1e-4, rtol=1e-5)
    # In the processor's tiles, where it has them: of 16 rows, of 32, or of fewer.
    for count in (*range(65), 96, 97, 99, 129):
        last = slice(NUM_ROWS - count, NUM_ROWS)
        assert torch.equal(product(given[last]), together[last]), count
    order = torch.randperm(NUM_ROWS)
    assert torch.equal(product(given[order]), together[order])
    shaped = product(given.view(2, -1, inputs))
    assert torch.equal(shaped.view(-1, outputs), together)
