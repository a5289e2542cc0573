"""A decoder layer's forward as one native call, for the layers that most models share.

Recognised are layers of the Llama family: RMS norm, q k v, rotation by halves, attention, residual,
RMS norm, gated feed-forward, residual; with biases or norms of queries and keys where a model has
them.  Only model classes that are known to consist of nothing else are asked, and each layer is
compared with the original: one that computes anything else stays as it is.
"""

from __future__ import annotations

import copy
import ctypes
import logging
from typing import Any, NamedTuple

import torch

from cluster.engine.attention.cpu import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.cpu.comparison import Comparison, is_close, is_comparable
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRMSNorm, SiblingLinear
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import PRODUCT_NAMES, Rows, Weights

log = logging.getLogger(__name__)

_TOLERANCE = 1e-5
_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_product"}
_OWN_NORMS = {"q_norm", "k_norm"}


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
    if not is_comparable(module):
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
    children = dict(layer.named_children())
    if children.keys() != _CHILDREN or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    attention: Any = children["self_attn"]
    parts = dict(attention.named_children())
    if parts.keys() - _OWN_NORMS != _PRODUCTS:
        return None
    index, head_dim = (getattr(attention, name, None) for name in ("layer_idx", "head_dim"))
    input_norm, post_norm = children["input_layernorm"], children["post_attention_layernorm"]
    query_norm, key_norm = parts.get("q_norm"), parts.get("k_norm")
    qkv, out, mlp = parts["qkv_product"], parts["o_proj"], children["mlp"]
    query, key = parts["q_proj"], parts["k_proj"]
    if (
        not isinstance(index, int)
        or not isinstance(head_dim, int)
        or not isinstance(mlp, NativeMLP)
        or not isinstance(input_norm, NativeRMSNorm)
        or not isinstance(post_norm, NativeRMSNorm)
        or not isinstance(query_norm, NativeRMSNorm | None)
        or not isinstance(key_norm, NativeRMSNorm | None)
        or not isinstance(query, SiblingLinear)
        or not isinstance(key, SiblingLinear)
        or not isinstance(qkv, PackedLinear)
        or not isinstance(out, PackedLinear)
        or not out.is_native
        or head_dim % kernels.lanes
    ):
        return None
    num_heads, num_kv_heads = query.out_features // head_dim, key.out_features // head_dim
    if num_heads // num_kv_heads > kernels.max_sharing:
        return None
    return _Parts(
        input_norm,
        post_norm,
        query_norm,
        key_norm,
        qkv,
        out,
        mlp,
        num_heads,
        num_kv_heads,
        head_dim,
        index,
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
    count, size = comparison.num_rows, parts.qkv.in_features
    hidden = torch.linspace(-1, 1, count * size).mul(97.0).sin().view(1, count, size)
    # Rows of all sizes, and the same sizes at both ends of the text.
    hidden *= torch.tensor([1e-3, 1.0, 30.0, 0.1, 5.0, 1.0]).repeat(count // 6).view(1, count, 1)
    position_ids = comparison.positions.unsqueeze(0)
    with torch.inference_mode():
        arguments: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": position_ids,
            "past_key_values": None,
            "use_cache": False,
            "position_embeddings": rotary(hidden, position_ids=position_ids),
        }
        reference, step = comparison.layer_steps(parts.layer)
        try:
            expected = layer(hidden, plan=reference, **arguments)
        except (RuntimeError, TypeError, ValueError, AttributeError):  # it takes something else
            return None
        options = reference.options
        if options is None or options.softcap is not None or options.sinks is not None:
            return None
        native = NativeLayer(layer, parts, options.scaling, kernels, scratch)
        found = native(hidden, plan=step, **arguments)
        is_ours = step.options is None
        pairs = [(expected, found), (reference.kv(0).unsqueeze(0), step.kv(0).unsqueeze(0))]
        is_same = all(is_close(*pair, _TOLERANCE) for pair in pairs)
        return native if is_ours and is_same else None
