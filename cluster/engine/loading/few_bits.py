"""Weights in few bits, on a CPU: which are wanted of a model, and which it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.narrow import (
    LINEAR_SHARE,
    keep_in_bf16,
    may_take,
    multiply_in_bf16,
    multiply_in_groups,
)
from cluster.engine.cpu.packed_linear import PackedLinear, is_packable, plain_share
from cluster.engine.loading.model_config import cached_layers, quantised_by
from cluster.engine.loading.renumbered import Numbering
from cluster.errors import ConfigError
from cluster.models.experts import unstacked
from cluster.models.grouped import (
    GroupedWeight,
    StoredGroups,
    in_eight_bits,
    in_four_bits,
    int8_groups,
    is_int8,
)
from cluster.models.weights import GROUPED

# Bits of a weight in memory: with a scale of 16 bits for each 32 inputs, in int4 a least value too.
ROUNDED_BITS = {"int8": 8 + 16 / 32, "int4": 4 + 2 * 16 / 32}


def check_few_bits(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError where weights are to be rounded for another device than a CPU."""
    if config.is_rounded and device.type != "cpu":
        raise ConfigError(
            f"{config.weights} is for our kernels on a CPU, not for {device}; use quantization "
            "(transformers' configuration, for instance quant_method: torchao or bitsandbytes), or "
            "set device: cpu",
            param="weights",
        )


def wanted_format(folder: Path, config: EngineConfig) -> str:
    """The format in which a model's weights are to be multiplied: int8, int4, stored (in groups of
    few bits), or bf16 for all others."""
    if config.weights != "auto":
        return config.weights
    if is_int8(folder):
        return "int8"
    return "stored" if (folder / GROUPED).is_file() else "bf16"


def may_stay_narrow(config: EngineConfig, device: torch.device, model_config: Any) -> bool:
    """True if our kernels keep a model in bfloat16 or fewer bits, should it consist of plain linear
    layers.  model_config: transformers' of the whole model."""
    text_config = model_config.get_text_config(decoder=True)
    is_bf16 = getattr(text_config, "dtype", None) == torch.bfloat16
    return (
        device.type == "cpu"
        and config.dtype == "auto"
        and (is_bf16 or config.weights != "auto")
        and config.device_map is None
        and quantised_by(model_config, config) is None
        and may_take(
            config,
            int(text_config.num_attention_heads),
            cached_layers(text_config, torch.bfloat16),
        )
    )


def few_bits(
    module: Any, config: EngineConfig, folder: Path, numbering: Numbering | None
) -> Mapping[str, GroupedWeight]:
    """The weights in few bits that a loaded model is to have, by the names of its linear layers;
    made before these are packed."""
    format = wanted_format(folder, config)
    output = module.get_output_embeddings()
    names = {name: layer for name, layer in module.named_modules() if is_packable(layer)}
    if config.output_weights == "bf16":
        names = {name: layer for name, layer in names.items() if layer is not output}
    # What a folder stores is of the output layer's own rows.
    renumbered = {name for name, layer in names.items() if layer is output and numbering}
    if format == "stored":
        return StoredGroups(folder, names.keys() - renumbered)
    if format == "bf16":
        return {}
    rounded = in_eight_bits if format == "int8" else in_four_bits
    stored = int8_groups(folder) if format == "int8" and is_int8(folder) else {}
    found = {
        name: stored[name] if name in stored and name not in renumbered else rounded(layer.weight)
        for name, layer in names.items()
    }
    return {name: each for name, each in found.items() if each is not None}


def multiply_narrow(
    module: Any, native: Kernels, groups: Mapping[str, GroupedWeight], config: EngineConfig
) -> None:
    """Let the packed layers of a widened model multiply with these weights, all others in
    bfloat16.  groups: see `few_bits`."""
    num_grouped = multiply_in_groups(module, native, groups)
    # Those of bfloat16 round as the processor does, all others alike on every processor.
    if not num_grouped and not config.reproducible:
        multiply_in_bf16(module, native)
    keep_in_bf16(module.get_input_embeddings())


def served_weights(module: Any) -> str:
    """The formats of the layers' and the output layer's weights, for instance
    "int4g32|output=bf16"; "" for a model that has none in few bits."""
    layers = [each for each in module.modules() if isinstance(each, PackedLinear)]
    output = module.get_output_embeddings()
    inner = sorted({each.weights for each in layers if each is not output})
    outer = output.weights if isinstance(output, PackedLinear) else "bf16"
    if not any(each.startswith("int") for each in (*inner, outer)):
        return ""
    return f"{'+'.join(inner)}|output={outer}"


def computed_instead(
    folder: Path, config: EngineConfig, device: torch.device, *, is_widened: bool
) -> str:
    """Return a line on what is computed in place of the format that a model is to have; "" = that.

    To be asked of a model that has no weights in few bits, or will have none.
    is_widened: our kernels compute it, in bfloat16."""
    is_other = config.dtype != "auto" or device.type != "cpu" or config.tensor_parallel > 1
    wanted = wanted_format(folder, config)
    if wanted == "bf16" or (is_other and config.weights == "auto"):
        return ""
    reason = (
        "products in groups of few bits are wrong here, or no layer's inputs divide by 16"
        if is_widened
        else "our kernels (which need a C++ compiler) take models of plain linear layers, "
        "in bfloat16"
    )
    what = "the file's weights in few bits" if wanted == "stored" else f"weights {wanted}"
    return f"{what} are widened to bfloat16: {reason}"


def planned_weights(
    folder: Path, module: torch.nn.Module, config: EngineConfig, products: str = ""
) -> str:
    """A line on the weights of a model that is to be loaded on a CPU with a C++ compiler.

    module: without weights.  products: as in EngineState, "" = not known."""
    wanted, share = wanted_format(folder, config), plain_share(unstacked(module))
    if wanted == "bf16":
        return ""
    if share < LINEAR_SHARE:
        return (
            f"weights stay wide, not {wanted}: {share:.0%} of them are in plain linear "
            "layers and experts that stand as such, the rest in others"
        )
    words = {
        "stored": "as the file stores them, in groups of few bits",
        "int8": "in int8, in groups of 32 inputs",
        "int4": "in int4, in groups of 32 inputs",
    }
    output = ", the output layer's in bfloat16" * (config.output_weights == "bf16")
    by = f"; products: {products}" if products else ""
    return f"weights {words[wanted]}{output}{by}"
