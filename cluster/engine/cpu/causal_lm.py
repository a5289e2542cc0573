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

from cluster.engine.attention.cpu import NativePlan
from cluster.engine.attention.seam import AttentionStep
from cluster.engine.comparison import Comparison, is_close
from cluster.engine.cpu.decoder_layer import NativeLayer, NativeLayers, native_layer
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.layers import NativeRMSNorm
from cluster.engine.cpu.packed_linear import PackedLinear
from cluster.engine.cpu.structures import GrowingModel
from cluster.engine.decoder import decoder_of, has_fixed_rotations, is_known
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.paths import StepInputs, StepOutputs, TapStates

log = logging.getLogger(__name__)

# Of logits: rounding, which each layer adds to, and which a wrong layer exceeds by far.
_TOLERANCE = 1e-4
# Some rows of deep models amplify rounding: what keys and values that differ by so much do to the
# logits, so many times, is rounding as well.  Each layer was compared alone before.
_ROUNDING = 1e-7
_AMPLIFIED = 8.0


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
    """The forward of a transformers model whose layers are all native ones."""

    def __init__(self, module: Any, layers: Sequence[NativeLayer], kernels: Kernels) -> None:
        base = module.model
        self.kernels = kernels
        self._layers = layers
        self._chain = NativeLayers(layers, kernels)
        self._embedding: torch.Tensor = base.embed_tokens.weight
        self._rotations = _Rotations(base.rotary_emb, kernels)
        self._norm: NativeRMSNorm = base.norm
        self._output: PackedLinear = module.lm_head
        self._cache: KVCache | None = None

    def of_part(self, module: Any, layers: Sequence[int]) -> NativeForward:
        """The forward of a model that has these of the layers."""
        return NativeForward(module, [self._layers[index] for index in layers], self.kernels)

    def take_products(self) -> None:
        """Multiply with the packed weights as they now are."""
        for layer in self._layers:
            layer.take_products()

    def __call__(self, inputs: StepInputs) -> StepOutputs | None:
        """None for a step that it is not made for."""
        plan = inputs.plan
        attention = plan.attention(0) if isinstance(plan, AttentionStep) else None
        if not isinstance(plan, AttentionStep) or not isinstance(attention, NativePlan):
            self._cache = None  # its steps run elsewhere
            return None
        if plan.cache is not self._cache:
            self._cache = plan.cache
            self._chain.take_cache(plan)
        if self._chain.cache_dtype is None:
            return None
        hidden = self._embedding.index_select(0, inputs.token_ids).float().unsqueeze(0)
        table = self._rotations.table(int(inputs.positions.max()) + 1)
        rotations = table.index_select(2, inputs.positions)
        rows = self._chain.rows(plan, attention, rotations)
        states, done = TapStates(inputs), 0
        for tap in sorted(set(inputs.taps)):
            self._chain.run(rows, hidden, done, tap)
            states.take(tap, self._norm(hidden[0]) if tap == len(self._layers) else hidden[0])
            done = tap
        self._chain.run(rows, hidden, done, len(self._layers))
        wanted = hidden[0].index_select(0, inputs.logit_rows)
        return StepOutputs(self._output.product(self._norm(wanted)), states.rows)

    def grows_on(self, cache: KVCache) -> bool:
        """True if steps on this cache run natively whatever their rows: it was the last one's."""
        return self._cache is cache and self._chain.cache_dtype is not None

    def growing_model(self, end: int, max_context_len: int) -> GrowingModel:
        """The model as native growth takes it, for positions below `end`, until the next call or
        step."""
        cosines, sines = self._rotations.table(end)
        bias, chain = self._output.float_bias, self._chain
        return GrowingModel(
            *(ctypes.addressof(each) for each in (chain.weights, chain.kvs, chain.windows)),
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
            chain.row_size,
            self._output.format,
            chain.cache_dtype == torch.bfloat16,
            self._embedding.dtype == torch.bfloat16,
            self._norm.variance_epsilon,
        )


def native_forward(module: Any, comparison: Comparison, kernels: Kernels) -> NativeForward | None:
    """The module's forward, if it is that of a plain decoder and computes the same, layer by layer
    and as a whole.

    Its layers are one group: a native call for all of them reads one page table."""
    if not is_known(type(module)):
        log.info("forward native=False: none is made for %s", type(module).__name__)
        return None
    if len(comparison.groups) > 1:
        log.info("forward native=False: layers with a window have page tables of their own")
        return None
    base = decoder_of(module)
    if (
        base is None
        or not isinstance(base.norm, NativeRMSNorm)
        or not isinstance(module.lm_head, PackedLinear)
        or not has_fixed_rotations(base.rotary_emb)
    ):
        return None
    layers: list[NativeLayer] = []
    for index, each in enumerate(base.layers):
        layer = native_layer(each, base.rotary_emb, comparison, kernels)
        if layer is None:
            log.info("forward native=False: layer %d is of another kind", index)
            return None
        layers.append(layer)
    forward = NativeForward(module, layers, kernels)
    is_same = _is_same(module, forward, comparison)
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
