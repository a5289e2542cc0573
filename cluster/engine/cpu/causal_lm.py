"""A whole model's forward around the native layers: embedding, layers, norm, output layer.

transformers' own takes more than a millisecond a step to find its way to the layers, which is as
much as a small drafting model computes for.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cluster.engine.attention.cpu import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.comparison import Comparison, is_close
from cluster.engine.cpu.decoder_layer import NativeLayer
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import NativeRMSNorm
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import GrowingModel, Rows, Weights
from cluster.engine.decoder import decoder_of, has_fixed_rotations
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.paths import StepInputs, StepOutputs
from cluster.engine.types import Ability

log = logging.getLogger(__name__)

# Of logits: rounding, which each layer adds to, and which a wrong layer exceeds by far.
_TOLERANCE = 1e-4
# Some rows of deep models amplify rounding: what keys and values that differ by so much do to the
# logits, so many times, is rounding as well.  Each layer was compared alone before.
_ROUNDING = 1e-7
_AMPLIFIED = 8.0
_CACHE_DTYPES = (torch.float32, torch.bfloat16)


class _ExactPowers(TorchFunctionMode):
    """Powers by double precision: torch's own last bit depends on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__rpow__:
            return func(args[0].double(), args[1]).float()
        return func(*args, **(kwargs or {}))


class _Rotations:
    """A model's cosines and sines for each position, looked up in a table where they depend on
    nothing else; its bits are the same on every processor."""

    _FIRST_LEN = 1024

    def __init__(self, module: Any, kernels: Kernels) -> None:
        self._module = module
        self._kernels = kernels
        self._table: torch.Tensor | None = None
        self.is_fixed = has_fixed_rotations(module)
        if self.is_fixed:
            with _ExactPowers():
                self._frequencies: torch.Tensor = type(module)(module.config).inv_freq

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor, end: int) -> torch.Tensor:
        """Those of int64[rows] positions below `end`: [2, 1, rows, head_dim], cosines first."""
        if not self.is_fixed:
            return torch.stack(self._module(hidden, position_ids=positions.unsqueeze(0)))
        return self.table(end).index_select(2, positions)

    def table(self, end: int) -> torch.Tensor:
        """Those of all positions below `end`, and more, where they are fixed."""
        table = self._table
        if table is None or table.shape[2] < end:
            length, scaling = max(2 * end, self._FIRST_LEN), self._module.attention_scaling
            table = self._table = self._kernels.rotations(self._frequencies, length, scaling)
        return table


class NativeForward:
    """The forward of a transformers model whose layers are all native ones."""

    abilities = frozenset({Ability.TAPS})

    def __init__(self, module: Any, layers: list[NativeLayer], kernels: Kernels) -> None:
        base = module.model
        self.kernels = kernels
        self._layers = layers  # own what the addresses below are of
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._rotations = _Rotations(base.rotary_emb, kernels)
        self._norm: NativeRMSNorm = base.norm
        self._output: PackedLinear = module.lm_head
        self._row_size = max(layer.row_size for layer in layers)
        pointers = [ctypes.pointer(layer.weights) for layer in layers]
        self._weights = (ctypes.POINTER(Weights) * len(layers))(*pointers)
        self._cache: KVCache | None = None
        self._kvs = (ctypes.c_void_p * len(layers))()
        self._windows = (ctypes.c_int64 * len(layers))()
        self._is_cache_native = False

    def __call__(self, inputs: StepInputs) -> StepOutputs | None:
        """None for a step that it is not made for."""
        plan = inputs.plan
        attention = plan.attention(0) if isinstance(plan, AttentionStep) else None
        if not isinstance(plan, AttentionStep) or not isinstance(attention, NativePlan):
            self._cache = None  # its steps run elsewhere
            return None
        if plan.cache is not self._cache:
            self._take_cache(plan)
        hidden = self._embedding.index_select(0, inputs.token_ids).float().unsqueeze(0)
        end = int(inputs.positions.max()) + 1
        cosines, sines = self._rotations(hidden, inputs.positions, end)
        first = self._layers[0]
        if not self._is_cache_native or not first.takes(hidden, cosines, sines, plan.kv(0)):
            return None
        size = self._row_size * len(inputs.token_ids)
        rows = first.scratch.rows(plan, 0, attention, cosines, sines, size)
        taps = self._run_layers(rows, hidden, inputs.taps)
        wanted = hidden[0].index_select(0, inputs.logit_rows)
        return StepOutputs(self._output.product(self._norm(wanted)), taps)

    def _run_layers(
        self, rows: Rows, hidden: torch.Tensor, taps: tuple[int, ...]
    ) -> torch.Tensor | None:
        """Run all layers, in place on hidden [1, rows, size]; returns copies of the tapped rows."""
        states = hidden.new_empty(hidden.shape[1], len(taps), hidden.shape[2]) if taps else None
        done = 0
        for tap in sorted(set(taps)):
            self._run(rows, hidden, done, tap)
            done = tap
            seen = self._norm(hidden[0]) if tap == len(self._layers) else hidden[0]
            for column, each in enumerate(taps):
                if states is not None and each == tap:
                    states[:, column] = seen
        self._run(rows, hidden, done, len(self._layers))
        return states

    def _run(self, rows: Rows, hidden: torch.Tensor, start: int, stop: int) -> None:
        if start < stop:
            self.kernels.decoder_layers(
                self._weights, rows, self._kvs, self._windows, hidden.data_ptr(), start, stop
            )

    def grows_on(self, cache: KVCache) -> bool:
        """True if steps on this cache run natively whatever their rows: it was the last one's."""
        return self._cache is cache and self._is_cache_native and self._rotations.is_fixed

    def growing_model(self, end: int, max_context_len: int) -> tuple[GrowingModel, torch.Tensor]:
        """The model as native growth takes it, for positions below `end` and more; it refers to the
        rotations, which have to live as long."""
        rotations = self._rotations.table(end)
        cosines, sines = rotations
        bias, cache = self._output.float_bias, self._cache
        model = GrowingModel(
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
            cache is not None and cache.layers[0].dtype == torch.bfloat16,
            self._embedding.dtype == torch.bfloat16,
            self._norm.variance_epsilon,
        )
        return model, rotations

    def _take_cache(self, step: AttentionStep) -> None:
        # The model's own; behind them may stand those of a draft head.
        layers = step.cache.layers[: len(self._layers)]
        self._cache = step.cache
        self._is_cache_native = all(
            kv.dtype == layers[0].dtype and kv.dtype in _CACHE_DTYPES and kv.is_contiguous()
            for kv in layers
        )
        for index, kv in enumerate(layers):
            self._kvs[index] = kv.data_ptr()
            self._windows[index] = step.window(index) or 0


def native_forward(module: Any, comparison: Comparison, kernels: Kernels) -> NativeForward | None:
    """The module's forward, if it is that of a plain decoder and computes the same.

    Its layers are one group: a native call for all of them reads one page table."""
    if len(comparison.groups) > 1:
        log.info("forward native=False: layers with a window have page tables of their own")
        return None
    base = decoder_of(module)
    if (
        base is None
        or not isinstance(base.norm, NativeRMSNorm)
        or not isinstance(module.lm_head, PackedLinear)
        or not module.lm_head.is_native
    ):
        return None
    layers = [getattr(layer, "forward", None) for layer in base.layers]
    native = [layer for layer in layers if isinstance(layer, NativeLayer)]
    if not native or len(native) < len(layers):
        return None
    forward = NativeForward(module, native, kernels)
    is_same = _is_same(module, forward, comparison)
    native[0].scratch.forget()
    log.info("forward native=%s", is_same)
    return forward if is_same else None


def _is_same(module: Any, forward: NativeForward, comparison: Comparison) -> bool:
    rows = torch.arange(comparison.num_rows)
    token_ids, positions = rows * 7919 % module.lm_head.out_features, comparison.positions
    reference, step = comparison.steps()
    shaken, _ = comparison.steps()
    generator = torch.Generator().manual_seed(0)

    def logits(plan: AttentionStep) -> torch.Tensor:
        found: torch.Tensor = module(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            plan=plan,
        ).logits
        return found

    with torch.inference_mode():
        for kv in shaken.cache.layers:
            kv.mul_(1.0 + _ROUNDING * torch.randn(kv.shape, generator=generator))
        expected = logits(reference)
        amplified = (logits(shaken) - expected).norm(dim=-1) / expected.norm(dim=-1)  # [1, rows]
        found = forward(StepInputs(token_ids, positions, rows, step))
    tolerance = (_AMPLIFIED * amplified).clamp(min=_TOLERANCE)
    return found is not None and is_close(expected, found.logits.unsqueeze(0), tolerance)
