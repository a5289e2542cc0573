"""A whole model's forward around the native layers: embedding, layers, norm, output layer.

transformers' own takes more than a millisecond a step to find its way to the layers, which is as
much as a small drafting model computes for, and about one more in each layer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cluster.engine.attention.backends import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.cpu.kernels import CACHE_DTYPES, Kernels
from cluster.engine.cpu.layers import NativeMLP, NativeRMSNorm
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.decoder import JOINED, LayerParts, decoder_of
from cluster.engine.draw.native import RankedDraw, fields
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.paths import StepInputs, StepOutputs, TapStates
from cluster.engine.types import LayerSpec

# The structures that native calls take, as ctypes has them, beside their names in the C++ sources.
#
# A field that only one side has would shift all that follow it; a test compares their sizes.

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class Weights(ctypes.Structure):
    """operations.h's DecoderLayer."""

    _fields_ = (
        *fields(_POINTER, "input_norm", "post_norm", "query_norm", "key_norm"),
        *fields(_POINTER, "qkv", "out", "gate_up", "down"),
        *fields(_POINTER, "qkv_bias", "out_bias", "gate_up_bias", "down_bias"),
        *fields(_INT64, "size", "num_heads", "num_kv_heads", "head_dim", "inner_size"),
        *fields(_INT32, "qkv_format", "out_format", "gate_up_format", "down_format"),
        *fields(_FLOAT, "input_epsilon", "post_epsilon", "query_epsilon", "key_epsilon"),
        ("scaling", _FLOAT),
        ("is_rotated", _INT32),
    )


class Rows(ctypes.Structure):
    """operations.h's Rows."""

    _fields_ = (
        *fields(_POINTER, "cosines", "sines", "slots"),
        *fields(_POINTER, "path_slots", "row_slots", "row_contexts", "row_paths"),
        *fields(_POINTER, "row_path_lens", "task_rows"),
        *fields(_INT64, "num_rows", "num_seen", "num_tasks"),
        ("scratch", _POINTER),
        ("cache_is_bf16", _INT32),
    )


class GrowingModel(ctypes.Structure):
    """grow.cpp's GrowingModel."""

    _fields_ = (
        *fields(_POINTER, "layers", "caches", "windows"),
        *fields(_POINTER, "embedding", "cosines", "sines", "norm", "output_bias"),
        ("output", _POINTER),
        *fields(_INT64, "num_layers", "size", "head_dim", "output_size"),
        *fields(_INT64, "max_context_len", "row_size"),
        *fields(_INT32, "output_format", "cache_is_bf16", "embedding_is_bf16"),
        ("norm_epsilon", _FLOAT),
    )


class GrowthRules(ctypes.Structure):
    """grow.cpp's Growth: how trees grow, as in `LMOptions`.

    vocab_size: tokens below it are candidates.  kept_share: as `KEPT_SHARE` of
    `cluster.draft.live_tree`.  max_seconds: after so much of a call no pass begins.  interrupted,
    scratch: are the call's own.
    """

    _fields_ = (
        *fields(_INT64, "num_candidates", "num_children", "width", "max_rows"),
        ("vocab_size", _INT64),
        *fields(_DOUBLE, "min_survival", "kept_share", "max_seconds"),
        *fields(_POINTER, "interrupted", "scratch"),
    )


class GrowingTree(ctypes.Structure):
    """grow.cpp's GrowingTree."""

    _fields_ = (
        ("draw", RankedDraw),
        *fields(_DOUBLE, "tau", "coverage"),
        *fields(_INT64, "max_tokens", "min_tokens", "num_stop_tokens"),
        *fields(_POINTER, "stop_tokens", "slots", "delta"),
        *fields(_INT64, "context_len", "num_delta", "max_slots", "num_slots"),
        *fields(_INT64, "num_leaves", "num_nodes", "num_expanded"),
        *fields(_INT64, "num_wanted", "num_best"),
        *fields(_POINTER, "slot_tokens", "slot_parents"),
        *fields(_POINTER, "leaves", "leaf_tokens", "leaf_parents", "leaf_depths"),
        *fields(_POINTER, "leaf_survivals", "best_survivals"),
        *fields(_POINTER, "expanded", "num_children", "children", "survivals"),
        *fields(_POINTER, "token_ids", "scores"),
    )


log = logging.getLogger(__name__)


class _ExactPowers(TorchFunctionMode):
    """Powers by double precision: torch's own last bit depends on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__rpow__:
            return func(args[0].double(), args[1]).float()
        return func(*args, **(kwargs or {}))


class _Rotations:
    """The cosines and sines that a model turns positions by, which depend on nothing else; their
    bits are the same on every processor."""

    _FIRST_LEN = 1024

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._kernels = kernels
        self._scaling: float = module.attention_scaling
        with _ExactPowers():
            self._frequencies: torch.Tensor = type(module)(module.config).inv_freq
        self._table = kernels.rotations(self._frequencies, self._FIRST_LEN, self._scaling)

    def table(self, end: int) -> torch.Tensor:
        """Those of all positions below `end`, and more: [2, 1, positions, head_dim], cosines
        first."""
        if self._table.shape[2] < end:
            self._table = self._kernels.rotations(self._frequencies, 2 * end, self._scaling)
        return self._table


class NativeForward:
    """The forward of a transformers model whose layers are all native ones, of one page table."""

    def __init__(self, module: Any, layers: Sequence[LayerParts], kernels: Kernels) -> None:
        base = module.model
        self.kernels = kernels
        self._layers = layers  # own what the addresses below are of
        # One entry per layer, as the kernels take them.
        weights = [_weights_of(each) for each in layers]
        self._weights = (ctypes.POINTER(Weights) * len(layers))(*map(ctypes.pointer, weights))
        self._kvs = (ctypes.c_void_p * len(layers))()
        self._windows = (ctypes.c_int64 * len(layers))()
        scratch = kernels.library.decoder_layer_scratch
        self._row_size = max(scratch(ctypes.byref(each), 1) for each in weights)
        # Between a layer's operations; it grows to the largest step.
        self._memory = torch.empty(0, dtype=torch.float32)
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._rotations = _Rotations(base.rotary_emb, kernels)
        self._norm: NativeRMSNorm = base.norm
        self._output: PackedLinear = module.lm_head
        # Of the last step; a dtype of None = it is not one that the kernels read.
        self._cache: KVCache | None = None
        self._cache_dtype: torch.dtype | None = None

    def of_part(self, module: Any, layers: Sequence[int]) -> NativeForward:
        """The forward of a model that has these of the layers."""
        return NativeForward(module, [self._layers[index] for index in layers], self.kernels)

    def __call__(self, inputs: StepInputs) -> StepOutputs | None:
        """None for a step that it is not made for."""
        plan = inputs.plan
        attention = plan.attention(0)
        if not isinstance(attention, NativePlan):
            self._cache = None  # its steps run elsewhere
            return None
        if plan.cache is not self._cache:
            self._take_cache(plan)
        if self._cache_dtype is None:
            return None
        hidden = self._embedding.index_select(0, inputs.token_ids).float().unsqueeze(0)
        table = self._rotations.table(int(inputs.positions.max()) + 1)
        rotations = table.index_select(2, inputs.positions)
        rows = self._rows(plan, attention, rotations)
        states, done = TapStates(inputs), 0
        for tap in sorted(set(inputs.taps)):
            self._run(rows, hidden, done, tap)
            states.take(tap, self._norm(hidden[0]) if tap == len(self._layers) else hidden[0])
            done = tap
        self._run(rows, hidden, done, len(self._layers))
        wanted = hidden[0].index_select(0, inputs.logit_rows)
        return StepOutputs(self._output.forward(self._norm(wanted)), states.rows)

    def _take_cache(self, step: AttentionStep) -> None:
        """Read and write this step's cache from now on."""
        self._cache = step.cache
        # The model's own; behind them may stand those of a draft head.
        layers = step.cache.layers[: len(self._layers)]
        dtype = layers[0].dtype
        is_native = dtype in CACHE_DTYPES and all(
            kv.dtype == dtype and kv.is_contiguous() for kv in layers
        )
        self._cache_dtype = dtype if is_native else None
        for index, kv in enumerate(layers):
            self._kvs[index] = kv.data_ptr()
            self._windows[index] = step.window(index) or 0

    def _rows(self, step: AttentionStep, plan: NativePlan, rotations: torch.Tensor) -> Rows:
        """The step's rows as the kernels take them; the arguments have to outlive them.

        plan: the attention of all layers.  rotations: float32[2, 1, rows, head_dim], cosines first.
        """
        cosines, sines = rotations
        slots, seen = step.write_slots(0), plan.row_pointers
        size = self._row_size * len(slots)
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
            self._cache_dtype == torch.bfloat16,
        )

    def _run(self, rows: Rows, hidden: torch.Tensor, start: int, stop: int) -> None:
        """The layers [start, stop), in place on float32 hidden [1, rows, size]."""
        self.kernels.library.decoder_layers(
            self._weights,
            ctypes.byref(rows),
            self._kvs,
            self._windows,
            start,
            stop,
            hidden.data_ptr(),
            self.kernels.num_threads,
        )

    def grows_on(self, cache: KVCache) -> bool:
        """True if steps on this cache run natively whatever their rows: it was the last one's."""
        return self._cache is cache and self._cache_dtype is not None

    def growing_model(self, end: int, max_context_len: int) -> GrowingModel:
        """The model as native growth takes it, for positions below `end`, until the next call or
        step."""
        cosines, sines = self._rotations.table(end)
        bias = self._output.float_bias
        return GrowingModel(
            *(ctypes.addressof(each) for each in (self._weights, self._kvs, self._windows)),
            self._embedding.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            self._norm.weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self._output.packed.data_ptr(),
            len(self._layers),
            self._embedding.shape[1],
            cosines.shape[-1],
            self._output.out_features,
            max_context_len,
            self._row_size,
            self._output.format,
            self._cache_dtype == torch.bfloat16,
            self._embedding.dtype == torch.bfloat16,
            self._norm.variance_epsilon,
        )


def native_forward(
    module: Any, layers: Sequence[LayerSpec], kernels: Kernels
) -> NativeForward | None:
    """The module's forward, if our kernels compute all of it.

    To be called when its parts are fused and packed.  layers: as probed.  They are one group: a
    native call for all of them reads one page table."""
    decoder = decoder_of(module)
    if (
        decoder is None
        or not isinstance(decoder.base.norm, NativeRMSNorm)
        or not isinstance(module.lm_head, PackedLinear)
    ):
        log.info("forward native=False: none is made for %s", type(module).__name__)
        return None
    if len({each.window is None for each in layers}) > 1:
        log.info("forward native=False: layers with a window have page tables of their own")
        return None
    found: list[LayerParts] = []
    for index, (parts, spec) in enumerate(zip(decoder.layers, layers, strict=True)):
        if parts is None or not _is_ours(parts, spec, kernels):
            log.info("forward native=False: layer %d is of another kind", index)
            return None
        found.append(parts)
    log.info("forward native=True")
    return NativeForward(module, found, kernels)


def _is_ours(parts: LayerParts, spec: LayerSpec, kernels: Kernels) -> bool:
    """True if our kernels compute all of the layer.  spec: what it caches."""
    return (
        isinstance(getattr(parts.attention, JOINED, None), PackedLinear)
        and isinstance(parts.mlp, NativeMLP)
        and isinstance(parts.attention.o_proj, PackedLinear)
        and all(isinstance(each, NativeRMSNorm | None) for each in parts.norms)
        and kernels.attends(_num_heads(parts), spec)
    )


def _num_heads(parts: LayerParts) -> int:
    return int(parts.attention.q_proj.out_features) // parts.head_dim


def _weights_of(parts: LayerParts) -> Weights:
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
