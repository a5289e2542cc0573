"""The memory that a model's weights take once they are loaded, by its files' headers alone.

On a CPU that is not what the files take: our kernels keep linear layers in bfloat16 or in few bits,
with an own copy of an output layer that shares the embedding's weight, and embeddings in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.cpu.narrow import LINEAR_SHARE
from cluster.engine.cpu.packed_linear import plain_share
from cluster.engine.device import resolve_device
from cluster.engine.loading.few_bits import (
    ROUNDED_BITS,
    may_stay_narrow,
    wanted_format,
    weights_dtype,
)
from cluster.engine.loading.inspection import describe
from cluster.engine.loading.planned import Planned, bare_module, planned
from cluster.models.experts import unstacked
from cluster.models.weights import GROUPED, header_of
from cluster.records import frozen

# Bits of a weight in bfloat16.
_BF16 = 16
# As configurations call the experts of a layer, and those that a token is sent to.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts")
# What an engine takes beside weights and cache on a CPU once it has made steps of all sizes: the
# libraries' threads and buffers, rows of activations, and what the allocator keeps.
# docs/plan.md has the measurements.
WORKING_BYTES = 96 * 1024 * 1024


@frozen
class HeldMemory:
    """weights: bytes, of all ranks, on GPUs of the fullest one.  working: what steps take beside
    them and the KV cache.  active: the share of the parameters that one token needs: of experts,
    those to which it is sent."""

    num_parameters: int
    weights: int
    working: int
    active: float


def held(folder: Path, config: EngineConfig, on_gpus: Planned | None = None) -> HeldMemory:
    """folder: of the model's config.json, and of its weights where they are here.  on_gpus: what it
    takes there, None = it is to run on this machine."""
    described = describe(str(folder), config)
    module = unstacked(bare_module(described))
    num_parameters = sum(each.numel() for each in module.parameters())
    active = 1.0 - _idle(module, described.text_config) / num_parameters
    if on_gpus is not None:
        return HeldMemory(num_parameters, on_gpus.rank_weights, on_gpus.beside, active)
    device = resolve_device(config.device)
    stored = getattr(described.text_config, "dtype", None) or torch.float32
    is_quantised = config.quantization or getattr(described.config, "quantization_config", None)
    if device.type != "cpu" or is_quantised or config.tensor_parallel > 1:
        sizes = planned(folder, described, config, is_here=True)
        working = sizes.beside if device.type != "cpu" else WORKING_BYTES
        return HeldMemory(num_parameters, sizes.weights, working, active)
    is_plain = plain_share(module) >= LINEAR_SHARE
    is_narrow = is_plain and may_stay_narrow(config, device, described.config)
    found = weights_dtype(config, device, stored, is_narrow=is_narrow)
    dtype = stored if isinstance(found, str) else found
    bits: float = 8 * dtype.itemsize
    groups: Mapping[str, int] = {}
    others = bits
    if kernels.load() is not None and is_plain and not config.compile:
        bits = _BF16 if stored == torch.bfloat16 else bits
        if dtype == torch.bfloat16:
            bits, groups = _few_bits(folder, config, bits)
    # An embedding that scales its rows stays in float32 beside our kernels.
    scaled = 8 * torch.float32.itemsize if is_narrow else others
    weights = _bytes(module, bits, groups, others, scaled)
    return HeldMemory(num_parameters, weights, WORKING_BYTES, active)


def _idle(module: Any, text_config: Any) -> float:
    """Return the parameters of experts that a token is not sent to."""
    named = module.named_parameters()
    in_experts = sum(each.numel() for name, each in named if ".experts." in name)
    if not in_experts:
        return 0.0
    chosen, count = (
        next(int(getattr(text_config, name)) for name in names if getattr(text_config, name, None))
        for names in (_NUM_CHOSEN, _NUM_EXPERTS)
    )
    share = chosen / count
    return float(in_experts * (1.0 - share))


def _few_bits(folder: Path, config: EngineConfig, bits: float) -> tuple[float, Mapping[str, int]]:
    """Return the bits of a linear layer's weight, and the bytes of those in a file of groups."""
    format = wanted_format(folder, config)
    if format in ROUNDED_BITS:
        return ROUNDED_BITS[format], {}
    if format != "stored":
        return bits, {}
    groups: dict[str, int] = {}
    for name, header in header_of(folder / GROUPED).items():
        start, end = header["data_offsets"]
        layer = name.rpartition(".")[0]
        groups[layer] = groups.get(layer, 0) + int(end) - int(start)
    return bits, groups


def _bytes(
    module: Any, bits: float, groups: Mapping[str, int], others: float, scaled: float
) -> int:
    """others: bits of what is no linear layer.  scaled: of embeddings that scale their rows."""
    total, counted = 0.0, set()
    for name, layer in module.named_modules():
        if type(layer) is torch.nn.Linear:
            counted.add(f"{name}.weight")
            total += groups.get(name, layer.weight.numel() * bits / 8)
        elif isinstance(layer, torch.nn.Embedding) and type(layer) is not torch.nn.Embedding:
            counted.add(f"{name}.weight")
            total += layer.weight.numel() * scaled / 8
    total += sum(
        each.numel() * others / 8 for name, each in module.named_parameters() if name not in counted
    )
    return int(total)
