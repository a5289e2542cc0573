"""A decoder layer's forward as one native call, for the layers that most models share.

They are recognised as `cluster.engine.decoder` says, and each is compared with the original: one
that computes anything else stays as it is.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from typing import Any, NamedTuple

import torch

from cluster.engine.attention.cpu import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.comparison import Comparison
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRMSNorm, SiblingLinear
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import PRODUCT_NAMES, Rows, Weights
from cluster.engine.decoder import is_known, layer_parts

log = logging.getLogger(__name__)

_TOLERANCE = 1e-5
_JOINED = frozenset({"qkv_product"})


class _Parts(NamedTuple):
    """The parts of a recognised layer."""

    input_norm: NativeRMSNorm
    post_norm: NativeRMSNorm
    query_norm: NativeRMSNorm | None
    key_norm: NativeRMSNorm | None
    qkv: PackedLinear
    out: PackedLinear
    mlp: NativeMLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer: int


class Scratch:
    """Memory between a layer's operations, shared by a model's layers; it grows to the largest
    step.  Also the rows of the step under way."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)
        self._plan: NativePlan | None = None
        self._cosines: torch.Tensor | None = None
        self._sines: torch.Tensor | None = None
        self._slots: torch.Tensor | None = None
        self._rows = Rows()

    def rows(
        self,
        step: AttentionStep,
        layer: int,
        plan: NativePlan,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        size: int,
    ) -> Rows:
        """The step's rows as the kernel takes them, with `size` floats of scratch memory.

        plan: the attention of that layer; layers that share it share rows."""
        if size > len(self._memory):
            # Told, for a library that loads a model in another thread may change torch's default.
            self._memory = torch.empty(size, dtype=torch.float32)
            self._plan = None
        if plan is not self._plan or cosines is not self._cosines or sines is not self._sines:
            # Kept as long as their addresses are in use.
            self._plan, self._cosines, self._sines = plan, cosines, sines
            self._slots = step.write_slots(layer)
            seen = plan.row_pointers
            self._rows = Rows(
                cosines.data_ptr(),
                sines.data_ptr(),
                self._slots.data_ptr(),
                *seen.pointers,
                len(self._slots),
                seen.num_rows,
                seen.num_tasks,
                self._memory.data_ptr(),
                step.kv(0).dtype == torch.bfloat16,
            )
        return self._rows

    def forget(self) -> None:
        """Let go of the last step's plan and tensors."""
        self._plan = self._cosines = self._sines = self._slots = None


class NativeLayer:
    """A decoder layer's `forward`; what it is not made for goes to the original one.

    weights: as the kernel takes them.  row_size: floats of scratch memory per row.
    """

    def __init__(
        self, layer: Any, parts: _Parts, scaling: float, kernels: Kernels, scratch: Scratch
    ) -> None:
        self._original = layer.forward
        self._kernels = kernels
        self._parts = parts  # owns what the addresses below are of
        self._head_dim = parts.head_dim
        self._index = parts.layer
        self.scratch = scratch
        self.weights = _weights(parts, scaling)
        self.row_size = kernels.decoder_layer_scratch(self.weights, 1)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        plan: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states [1, rows, size] -> the same shape."""
        if isinstance(plan, AttentionStep) and position_embeddings is not None and not args:
            attention = plan.attention(self._index)
            cosines, sines = position_embeddings
            kv = plan.kv(self._index)
            if isinstance(attention, NativePlan) and self.takes(hidden_states, cosines, sines, kv):
                return self._run(plan, attention, hidden_states, cosines, sines, kv)
        output: torch.Tensor = self._original(
            hidden_states, *args, position_embeddings=position_embeddings, plan=plan, **kwargs
        )
        return output

    def moved(self, layer: Any, index: int, scratch: Scratch) -> NativeLayer:
        """The same computation for a copy of the layer, at another place of another model."""
        other = copy.copy(self)
        other._original = layer.forward
        other._index = index
        other.scratch = scratch
        return other

    def take_products(self) -> None:
        """Multiply with the packed weights as they now are."""
        for name, product in zip(PRODUCT_NAMES, _products(self._parts), strict=True):
            setattr(self.weights, name, product.packed.data_ptr())
            setattr(self.weights, f"{name}_format", product.format)

    def takes(
        self, hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor
    ) -> bool:
        """True if the kernel is made for such tensors."""
        return (
            hidden.dtype == cosines.dtype == sines.dtype == torch.float32
            and kv.dtype in (torch.float32, torch.bfloat16)
            and hidden.shape[0] == 1
            and cosines.shape == sines.shape == (1, hidden.shape[1], self._head_dim)
            and hidden.is_contiguous()
            and cosines.is_contiguous()
            and sines.is_contiguous()
            and kv.is_contiguous()
        )

    def _run(
        self,
        step: AttentionStep,
        plan: NativePlan,
        hidden: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        kv: torch.Tensor,
    ) -> torch.Tensor:
        size = self.row_size * hidden.shape[1]
        rows = self.scratch.rows(step, self._index, plan, cosines, sines, size)
        output = hidden.clone()
        weights = (ctypes.POINTER(Weights) * 1)(ctypes.pointer(self.weights))
        kvs = (ctypes.c_void_p * 1)(kv.data_ptr())
        windows = (ctypes.c_int64 * 1)(step.window(self._index) or 0)
        self._kernels.decoder_layers(weights, rows, kvs, windows, output.data_ptr(), 0, 1)
        return output


def fuse_decoder_layers(module: Any, comparison: Comparison, kernels: Kernels) -> int:
    """Give every layer that is recognised a native forward; returns how many.

    To be called when the layer's parts are fused and packed.  The modules themselves stay.
    """
    if not is_known(type(module)):
        log.info("decoder layers fused count=0: none are made for %s", type(module).__name__)
        return 0
    num_fused = 0
    scratch = Scratch()
    for layer in module.modules():
        parts = _recognised(layer, kernels)
        if parts is None:
            continue
        rotary = module.model.rotary_emb
        native = _checked(layer, parts, rotary, comparison, kernels, scratch)
        if native is not None:
            layer.forward = native
            num_fused += 1
    scratch.forget()
    log.info("decoder layers fused count=%d", num_fused)
    return num_fused


def _products(parts: _Parts) -> tuple[PackedLinear, ...]:
    return parts.qkv, parts.out, parts.mlp.gate_up, parts.mlp.down


def _weights(parts: _Parts, scaling: float) -> Weights:
    norms = (parts.input_norm, parts.post_norm, parts.query_norm, parts.key_norm)
    products = _products(parts)
    return Weights(
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        *(product.packed.data_ptr() for product in products),
        *(None if bias is None else bias.data_ptr() for bias in (p.float_bias for p in products)),
        parts.qkv.in_features,
        parts.num_heads,
        parts.num_kv_heads,
        parts.head_dim,
        parts.mlp.down.in_features,
        *(product.format for product in products),
        *(0.0 if norm is None else norm.variance_epsilon for norm in norms),
        scaling,
    )


def _recognised(layer: torch.nn.Module, kernels: Kernels) -> _Parts | None:
    found = layer_parts(layer, _JOINED)
    if found is None:
        return None
    attention, head_dim = found.attention, found.head_dim
    query, key = attention.q_proj, attention.k_proj
    norms = found.input_norm, found.post_norm, found.query_norm, found.key_norm
    if (
        not isinstance(found.mlp, NativeMLP)
        or not all(isinstance(each, NativeRMSNorm) for each in norms[:2])
        or not all(isinstance(each, NativeRMSNorm | None) for each in norms)
        or not isinstance(query, SiblingLinear)
        or not isinstance(key, SiblingLinear)
        or not isinstance(attention.qkv_product, PackedLinear)
        or not isinstance(attention.o_proj, PackedLinear)
        or not attention.o_proj.is_native
        or head_dim % kernels.lanes
    ):
        return None
    num_heads, num_kv_heads = query.out_features // head_dim, key.out_features // head_dim
    if num_heads // num_kv_heads > kernels.max_sharing:
        return None
    return _Parts(
        *norms,
        attention.qkv_product,
        attention.o_proj,
        found.mlp,
        num_heads,
        num_kv_heads,
        head_dim,
        found.layer,
    )


def _checked(
    layer: torch.nn.Module,
    parts: _Parts,
    rotary: Any,
    comparison: Comparison,
    kernels: Kernels,
    scratch: Scratch,
) -> NativeLayer | None:
    """The layer's native forward, if it computes what the original does: outputs and cache."""
    with torch.inference_mode():
        case = comparison.of_layer(layer, parts.layer, parts.qkv.in_features, rotary)
        options = None if case is None else case.reference.options
        if case is None or options is None or options.softcap is not None:
            return None
        if options.sinks is not None:
            return None
        native = NativeLayer(layer, parts, options.scaling, kernels, scratch)
        found = native(case.hidden, plan=case.step, **case.arguments)
        is_ours = case.step.options is None
        return native if is_ours and case.is_same(found, parts.layer, _TOLERANCE) else None
