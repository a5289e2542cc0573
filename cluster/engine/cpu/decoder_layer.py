"""Decoder layers as the native kernels compute them, for the layers that most models share.

They are recognised as `cluster.engine.decoder` says.
"""

from __future__ import annotations

import torch

from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import JOINED, NativeMLP, NativeRMSNorm
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import Weights
from cluster.engine.decoder import LayerParts, layer_parts
from cluster.engine.types import LayerSpec


def native_parts(layer: torch.nn.Module, spec: LayerSpec, kernels: Kernels) -> LayerParts | None:
    """The layer's parts, if our kernels compute all of it.

    To be called when its parts are fused and packed.  spec: what it caches."""
    parts = layer_parts(layer, frozenset({JOINED}))
    if (
        parts is None
        or not isinstance(parts.mlp, NativeMLP)
        or not isinstance(parts.attention.o_proj, PackedLinear)
        or not all(isinstance(each, NativeRMSNorm | None) for each in parts.norms)
        or not kernels.attends(_num_heads(parts), spec)
    ):
        return None
    return parts


def _num_heads(parts: LayerParts) -> int:
    return int(parts.attention.q_proj.out_features) // parts.head_dim


def weights_of(parts: LayerParts) -> Weights:
    """As the kernels take them: addresses of what the parts own."""
    attention, mlp = parts.attention, parts.mlp
    products = attention.qkv_product, attention.o_proj, mlp.gate_up, mlp.down
    return Weights(
        *(None if norm is None else norm.weight.data_ptr() for norm in parts.norms),
        *(product.packed.data_ptr() for product in products),
        *(None if bias is None else bias.data_ptr() for bias in (p.float_bias for p in products)),
        products[0].in_features,
        _num_heads(parts),
        attention.k_proj.out_features // parts.head_dim,
        parts.head_dim,
        mlp.down.in_features,
        *(product.format for product in products),
        *(0.0 if norm is None else norm.variance_epsilon for norm in parts.norms),
        attention.scaling,
        # Some layers of SmolLM3 do not rotate.
        getattr(attention, "use_rope", True),
    )
