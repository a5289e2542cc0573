"""A whole model's forward on a GPU in ten kernels a layer, where transformers' own takes 41.

    add + RMS norm, q k v, rotation + write to the cache, attention (two), o,
    add + RMS norm, gate and up, SiLU product, down

Weights with one input are joined, and the modules keep views of them, so that no weight is there
twice and whoever asks the module itself (the reference of the check at load, steps with adapters)
gets what it was.  Models are recognised as `cluster.engine.decoder` says.

Of several ranks each has its heads and its part of the feed-forward, as transformers' plan splits
them.  The ranks sum the products of o and of down, and say nothing else in a layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

# Not public, but what the modules that transformers splits hand on.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from triton import knobs

from cluster.engine.decoder import LayerParts, decoder_of
from cluster.engine.fused.kernels import add_norm, rotate, silu_product
from cluster.engine.launch import LAUNCH_ERRORS, on_device
from cluster.engine.parallel import Alone
from cluster.engine.paths import StepInputs, StepOutputs, TapStates
from cluster.engine.reminder import in_a_line
from cluster.engine.types import AttentionOptions, LayerSpec
from cluster.records import record

log = logging.getLogger(__name__)

_DTYPES = {torch.float32, torch.float16, torch.bfloat16}


@record
class _Linear:
    """weight: [out, in].  bias: [out], or None.  ranks: each has a part of `in`, and they sum their
    products; None = this one has all of it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ranks: dist.ProcessGroup | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.ranks is None:
            return linear(rows, self.weight, self.bias)
        product = linear(rows, self.weight)
        dist.all_reduce(product, group=self.ranks)
        return product if self.bias is None else product.add_(self.bias)


@record
class _Norm:
    weight: torch.Tensor
    epsilon: float


@record
class _Layer:
    """head_norms: of queries and of keys, [2, head_dim]; None = they have none.  rotations: those
    of all layers, [2, positions, half of head_dim]."""

    index: int
    head_dim: int
    input_norm: _Norm
    post_norm: _Norm
    head_norms: _Norm | None
    qkv: _Linear
    out: _Linear
    gate_up: _Linear
    down: _Linear
    options: AttentionOptions
    rotations: torch.Tensor

    def attended(self, inputs: StepInputs, normed: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> the same shape, to be added to the hidden states."""
        norms, plan, index = self.head_norms, inputs.plan, self.index
        kv = plan.kv(index)
        query = rotate(
            self.qkv(normed).view(len(normed), -1, self.head_dim),
            kv,
            inputs.positions,
            plan.write_slots(index),
            self.rotations,
            None if norms is None else norms.weight,
            0.0 if norms is None else norms.epsilon,
        )
        attended = plan.attention(index).attend(query, kv, plan.window(index), self.options)
        return self.out(attended.flatten(1))

    def __call__(
        self, inputs: StepInputs, hidden: torch.Tensor, change: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden + change: what the layer is given, [rows, size].  Returns what is to be added to
        hidden next, which is changed, as change is."""
        normed = add_norm(hidden, change, self.input_norm.weight, self.input_norm.epsilon)
        change = self.attended(inputs, normed)
        normed = add_norm(hidden, change, self.post_norm.weight, self.post_norm.epsilon)
        return self.down(silu_product(self.gate_up(normed)))


class FusedForward:
    """The forward of a transformers model of the recognised kind.

    failure: why steps take another path; "" = they do not."""

    def __init__(self, module: Any, layers: Sequence[_Layer]) -> None:
        self.failure = ""
        self._module = module
        self._layers = layers
        self._norm = _norm(module.model.norm)

    def __call__(self, inputs: StepInputs) -> StepOutputs | None:
        """None for a step that it is not made for."""
        if self.failure:
            return None
        with on_device(inputs.token_ids.device):
            hidden = self._module.model.embed_tokens(inputs.token_ids)  # [rows, size]
            if isinstance(hidden, AsyncCollectiveTensor):
                hidden = hidden.wait()  # on the stream, as torch's operators do by themselves
            wanted, taps = self._decoded(inputs, hidden)
            logits: torch.Tensor = self._module.lm_head(wanted)
        del hidden, wanted  # logits of full precision take more memory than any layer
        return StepOutputs(logits.float(), taps)

    def _decoded(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the output layer is to multiply, and the taps.  hidden: [rows, size], is changed."""
        taps, norm, last = inputs.taps, self._norm, len(self._layers)
        states = TapStates(inputs)
        change: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            if number in taps and change is not None:
                hidden, change = hidden + change, None
            states.take(number, hidden)
            change = layer(inputs, hidden, change)
        if last not in taps:
            wanted = add_norm(hidden, change, norm.weight, norm.epsilon, inputs.logit_rows)
            return wanted, states.rows
        normed = add_norm(hidden, change, norm.weight, norm.epsilon)
        states.take(last, normed)
        return normed.index_select(0, inputs.logit_rows), states.rows

    def failure_in(self, inputs: StepInputs) -> str:
        """Why the kernels of a step cannot be run here; "" = they can.  What ranks sum is this
        one's part alone, so that no rank waits for one where they fail."""
        weight, alone = self._norm.weight, Alone()  # type: ignore[no-untyped-call]
        hidden = weight.new_zeros(len(inputs.token_ids), len(weight))
        try:
            with torch.inference_mode(), on_device(weight.device), alone:
                self._decoded(inputs, hidden)
        except LAUNCH_ERRORS as error:
            return in_a_line(error)
        return ""

    def of_part(self, module: Any, layers: Sequence[int]) -> FusedForward:
        """The forward of the module that consists of these layers, see `part_of`."""
        part = copy(self)
        part._module = module
        part._layers = [
            replace(self._layers[index], index=place) for place, index in enumerate(layers)
        ]
        return part

    def give_up(self, reason: str) -> None:
        """Leave all steps to the next path."""
        self.failure = f"layers: transformers' own forward is used: {reason}"
        log.warning("%s", self.failure)


def fused_forward(
    module: Any, layers: Sequence[LayerSpec], max_context_len: int
) -> FusedForward | None:
    """The module's forward, if it is of the recognised kind; not tried yet.

    layers: as probed.  It goes layer by layer, so that memory holds one layer's weights twice."""
    decoder = decoder_of(module)
    (device, *others) = {each.device for each in layers}
    if (
        decoder is None
        or others
        or layers[0].dtype not in _DTYPES
        or (device.type == "cpu" and not knobs.runtime.interpret)
        # Some rotate a part of a head.
        or 2 * len(decoder.base.rotary_emb.inv_freq) != layers[0].head_dim
        or any(_is_special(each, layers[0].dtype, device) for each in module.modules())
    ):
        return None
    known = [each for each in decoder.layers if each is not None and _has_plain_weights(each)]
    if not known or len(known) < len(decoder.layers):
        return None
    weight = decoder.base.norm.weight
    # As the model itself makes and rounds them, once; the halves of a head are alike.
    positions = torch.arange(max_context_len, device=weight.device).unsqueeze(0)
    whole = decoder.base.rotary_emb(weight, position_ids=positions)
    rotations = torch.stack([each[0, :, : layers[0].head_dim // 2] for each in whole])
    made = [_layer(each, rotations) for each in known]
    for layer, spec in zip(made, layers, strict=True):
        # A rank's part of q, k and v in one matrix is by rows, whatever they are.
        num_rows = layer.out.weight.shape[1] + 2 * spec.num_kv_heads * spec.head_dim
        if len(layer.qkv.weight) != num_rows:
            return None
    return FusedForward(module, made)


def _is_special(module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """True of modules with hooks, or parameters of another kind: quantised, elsewhere."""
    return (
        bool(module._forward_hooks or module._forward_pre_hooks)
        or hasattr(module, "_hf_hook")
        or any(
            type(each) not in (torch.nn.Parameter, DTensor)
            or each.dtype != dtype
            or each.device != device
            for each in module.parameters(recurse=False)
        )
    )


def _has_plain_weights(parts: LayerParts) -> bool:
    inputs, down = parts.inputs, getattr(parts.mlp, "down_proj", None)
    linears = (*inputs[0], parts.attention.o_proj, *inputs[1], down)
    norms = [norm for norm in (parts.query_norm, parts.key_norm) if norm is not None]
    return (
        all(type(each) is torch.nn.Linear for each in linears)
        and all(len({each.bias is None for each in group}) == 1 for group in inputs)
        and len(norms) != 1
        and len({each.variance_epsilon for each in norms}) < 2
        and bool(getattr(parts.attention, "use_rope", True))  # some of SmolLM3 do not rotate
    )


def _layer(parts: LayerParts, rotations: torch.Tensor) -> _Layer:
    attention, inputs = parts.attention, parts.inputs
    own = [norm for norm in (parts.query_norm, parts.key_norm) if norm is not None]
    return _Layer(
        parts.layer,
        parts.head_dim,
        _norm(parts.input_norm),
        _norm(parts.post_norm),
        _Norm(_joined(own, "weight"), own[0].variance_epsilon) if own else None,
        _linear(*inputs[0]),
        _linear(attention.o_proj),
        _linear(*inputs[1]),
        _linear(parts.mlp.down_proj),
        AttentionOptions(attention.scaling),
        rotations,
    )


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.data, module.variance_epsilon)


def _linear(*modules: Any) -> _Linear:
    weight = modules[0].weight
    is_summed = isinstance(weight, DTensor) and weight.placements[0].is_shard(1)
    ranks = weight.device_mesh.get_group() if is_summed else None
    has_bias = modules[0].bias is not None
    return _Linear(
        _joined(modules, "weight"), _joined(modules, "bias") if has_bias else None, ranks
    )


def _joined(modules: Sequence[Any], name: str) -> torch.Tensor:
    """The parameters of that name in one tensor, this rank's part of each, of which the modules get
    theirs."""
    parameters = [getattr(each, name) for each in modules]
    own = [each.to_local() if isinstance(each, DTensor) else each.data for each in parameters]
    if len(own) == 1:
        return own[0]
    whole = torch.cat(own)
    parts = whole.split_with_sizes(list(map(len, own)))
    for module, parameter, part in zip(modules, parameters, parts, strict=True):
        if isinstance(parameter, DTensor):
            part = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        setattr(module, name, torch.nn.Parameter(part, requires_grad=False))
    return whole
