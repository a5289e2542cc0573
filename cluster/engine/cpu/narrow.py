"""bfloat16 on a CPU by our own kernels: weights, keys and values are kept in it, sums in float32.

torch's libraries take a model in bfloat16 operation by operation, with a result rounded after
each, and with more time between the products than in them.  Our kernels take a float32 model: so
the model's numbers are widened, its layers fused and packed, and what is only kept (weights, cache)
becomes bfloat16 again.  Where the processor multiplies bfloat16, rows are rounded to it before a
product, as they would be in a bfloat16 model; norms, attention and residuals stay in float32.
Weights that were stored in int8 are kept in it and widened to bfloat16 in registers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.cpu.decoder_layer import NativeLayer
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.packed_linear import PackedLinear, linear_share
from cluster.engine.types import LayerSpec

log = logging.getLogger(__name__)

# Of a model's weights: what is not in plain linear layers would take twice the memory.
_LINEAR_SHARE = 0.99
# Rounding to 8 bits, against the exact product; a wrong instruction is off by about 1.
_TOLERANCE = 2e-2
_CHECKED_ROWS = (1, 2, 7, 13, 30)


def can_widen(
    module: torch.nn.Module, config: EngineConfig, num_heads: int, layers: Sequence[LayerSpec]
) -> bool:
    """True if to make a bfloat16 model one of float32, which our kernels will bring back to
    bfloat16.  num_heads: of queries.  layers: as probed."""
    kept = {(each.dtype, each.device.type) for each in module.parameters()}
    if (
        kept != {(torch.bfloat16, "cpu")}
        or config.compile
        or config.tensor_parallel > 1
        or config.attention not in ("auto", "native")
        or linear_share(module) < _LINEAR_SHARE
    ):
        return False
    native = kernels.load()  # last: a host that has no use for them compiles none
    return native is not None and all(native.attends(num_heads, layer) for layer in layers)


def multiply_in_bf16(module: torch.nn.Module, native: Kernels, *, is_int8: bool) -> int:
    """Let the packed bfloat16 weights of a widened model be multiplied in bfloat16, where the
    processor does that; returns how many there are.

    is_int8: the model was stored in int8, and keeps its weights so: half as much is to be read.
    """
    layers = [
        child
        for child in module.modules()
        if isinstance(child, PackedLinear) and child.format == Format.BF16
    ]
    if not native.multiplies_bf16 or not layers or not _agrees(layers[0], native, is_int8=is_int8):
        return 0
    for layer in layers:
        layer.format = Format.BF16_PRODUCTS
        if is_int8:
            layer.halve()
    for each in module.modules():
        forward: Any = each.forward
        if isinstance(forward, NativeLayer):
            forward.take_products()
    log.info("products in bfloat16 count=%d int8=%s", len(layers), is_int8)
    return len(layers)


def _agrees(layer: PackedLinear, native: Kernels, *, is_int8: bool) -> bool:
    """True if the rounded products are the exact ones but for rounding."""
    packed, format = layer.packed, Format.BF16_PRODUCTS
    if is_int8:
        packed, format = native.pack_int8(packed), Format.INT8_PRODUCTS
    with torch.inference_mode():
        for num_rows in _CHECKED_ROWS:
            rows = torch.linspace(-1, 1, num_rows * layer.in_features).mul(97.0).sin()
            rows = rows.view(num_rows, layer.in_features)
            exact = layer.product(rows)
            found = native.linear(rows, packed, layer.float_bias, layer.out_features, format)
            if not (found - exact).norm() <= _TOLERANCE * exact.norm():
                return False
    return True
