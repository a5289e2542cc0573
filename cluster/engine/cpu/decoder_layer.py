"""Decoder layers as native calls, for the layers that most models share.

They are recognised as `cluster.engine.decoder` says, and each is compared with the original.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from cluster.engine.attention.cpu import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.comparison import Comparison
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import JOINED, NativeMLP, NativeRMSNorm
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import PRODUCT_NAMES, Rows, Weights
from cluster.engine.decoder import LayerParts, layer_parts

_TOLERANCE = 1e-5
_CACHE_DTYPES = (torch.float32, torch.bfloat16)


class NativeLayer:
    """A decoder layer as the kernels compute it.

    weights: as they take them.  row_size: floats of scratch memory per row.
    """

    def __init__(self, parts: LayerParts, scaling: float, kernels: Kernels) -> None:
        self._parts = parts  # owns what the addresses below are of
        self.weights = _weights(parts, scaling)
        self.row_size: int = kernels.library.decoder_layer_scratch(ctypes.byref(self.weights), 1)

    def take_products(self) -> None:
        """Multiply with the packed weights as they now are."""
        for name, product in zip(PRODUCT_NAMES, _products(self._parts), strict=True):
            setattr(self.weights, name, product.packed.data_ptr())
            setattr(self.weights, f"{name}_format", product.format)


class NativeLayers:
    """Layers one after the other in one call, on one page table.

    weights, kvs, windows: one entry per layer, as the kernels take them.  cache_dtype: of the cache
    that was taken last; None = it is not one that they read."""

    def __init__(self, layers: Sequence[NativeLayer], kernels: Kernels) -> None:
        self._layers = layers  # own what the addresses below are of
        self._kernels = kernels
        self.row_size = max(layer.row_size for layer in layers)
        pointers = [ctypes.pointer(layer.weights) for layer in layers]
        self.weights = (ctypes.POINTER(Weights) * len(layers))(*pointers)
        self.kvs = (ctypes.c_void_p * len(layers))()
        self.windows = (ctypes.c_int64 * len(layers))()
        self.cache_dtype: torch.dtype | None = None
        # Between a layer's operations; it grows to the largest step.
        self._memory = torch.empty(0, dtype=torch.float32)

    def take_cache(self, step: AttentionStep, first: int = 0) -> None:
        """Read and write this step's cache from now on.  first: the number of the first layer."""
        # The model's own; behind them may stand those of a draft head.
        layers = step.cache.layers[first : first + len(self._layers)]
        dtype = layers[0].dtype
        is_native = dtype in _CACHE_DTYPES and all(
            kv.dtype == dtype and kv.is_contiguous() for kv in layers
        )
        self.cache_dtype = dtype if is_native else None
        for index, kv in enumerate(layers):
            self.kvs[index] = kv.data_ptr()
            self.windows[index] = step.window(first + index) or 0

    def rows(self, step: AttentionStep, plan: NativePlan, rotations: torch.Tensor) -> Rows:
        """The step's rows as the kernels take them; the arguments have to outlive them.

        plan: the attention of all layers.  rotations: float32[2, 1, rows, head_dim], cosines first.
        """
        cosines, sines = rotations
        slots, seen = step.write_slots(0), plan.row_pointers
        size = self.row_size * len(slots)
        if size > len(self._memory):
            # Told, for a library that loads a model in another thread may change torch's default.
            self._memory = torch.empty(size, dtype=torch.float32)
        return Rows(
            cosines.data_ptr(),
            sines.data_ptr(),
            slots.data_ptr(),
            *seen.pointers,
            len(slots),
            seen.num_rows,
            seen.num_tasks,
            self._memory.data_ptr(),
            self.cache_dtype == torch.bfloat16,
        )

    def run(self, rows: Rows, hidden: torch.Tensor, start: int, stop: int) -> None:
        """The layers [start, stop), in place on float32 hidden [1, rows, size]."""
        self._kernels.library.decoder_layers(
            self.weights,
            ctypes.byref(rows),
            self.kvs,
            self.windows,
            start,
            stop,
            hidden.data_ptr(),
            self._kernels.num_threads,
        )


def native_layer(
    layer: torch.nn.Module, rotary: Any, comparison: Comparison, kernels: Kernels
) -> NativeLayer | None:
    """The layer by our kernels, if it is recognised and they compute what the original does:
    outputs and cache.

    To be called when its parts are fused and packed.  rotary: the model's cosines and sines."""
    parts = layer_parts(layer, frozenset({JOINED}))
    if (
        parts is None
        or not isinstance(parts.mlp, NativeMLP)
        or not isinstance(parts.attention.o_proj, PackedLinear)
        or not all(isinstance(each, NativeRMSNorm | None) for each in parts.norms)
        or not kernels.attends(_num_heads(parts), comparison.layers[parts.layer])
    ):
        return None
    size = parts.attention.qkv_product.in_features
    with torch.inference_mode():
        case = comparison.of_layer(layer, parts.layer, size, rotary)
        if case is None:
            return None
        native = NativeLayer(parts, parts.attention.scaling, kernels)
        alone, found = NativeLayers([native], kernels), case.hidden.clone()
        alone.take_cache(case.step, parts.layer)
        attention = case.step.attention(0)
        assert isinstance(attention, NativePlan), "the comparison is of our kernels"
        rotations = torch.stack(case.arguments["position_embeddings"])
        alone.run(alone.rows(case.step, attention, rotations), found, 0, 1)
        return native if case.is_same(found, parts.layer, _TOLERANCE) else None


def _products(parts: LayerParts) -> tuple[PackedLinear, ...]:
    attention, mlp = parts.attention, parts.mlp
    return attention.qkv_product, attention.o_proj, mlp.gate_up, mlp.down


def _num_heads(parts: LayerParts) -> int:
    return int(parts.attention.q_proj.out_features) // parts.head_dim


def _weights(parts: LayerParts, scaling: float) -> Weights:
    products = _products(parts)
    return Weights(
        *(None if norm is None else norm.weight.data_ptr() for norm in parts.norms),
        *(product.packed.data_ptr() for product in products),
        *(None if bias is None else bias.data_ptr() for bias in (p.float_bias for p in products)),
        products[0].in_features,
        _num_heads(parts),
        parts.attention.k_proj.out_features // parts.head_dim,
        parts.head_dim,
        parts.mlp.down.in_features,
        *(product.format for product in products),
        *(0.0 if norm is None else norm.variance_epsilon for norm in parts.norms),
        scaling,
        # Some layers of SmolLM3 do not rotate.
        getattr(parts.attention, "use_rope", True),
    )
