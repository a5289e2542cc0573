"""What a CPU's memory holds of a model that our own kernels compute: bfloat16, or fewer bits.

torch's libraries take a model in bfloat16 operation by operation, with a result rounded after
each, and with more time between the products than in them.  Our kernels take a float32 model: so
the model's numbers are widened, its layers fused and packed, and what is only kept (weights,
embeddings, cache) becomes bfloat16 again.  Where the processor multiplies bfloat16, rows are
rounded to it before a product, as they would be in a bfloat16 model; norms and residuals stay in
float32.  Weights in groups of few bits are multiplied as they are, by rows rounded to 8: no other
row is rounded in such a model, whose bits are the same on every processor.  Which weights in few
bits are wanted of a model, and which it has, is said here too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.cpu.kernels import Format, Kernels
from cluster.engine.cpu.layers import products
from cluster.engine.cpu.packed_linear import (
    PackedLinear,
    agree,
    is_native,
    is_packable,
    linear_share,
    plain_share,
)
from cluster.engine.loading.model_config import cached_layers, quantised_by
from cluster.engine.loading.renumbered import Numbering
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.models.experts import Experts, unstacked
from cluster.models.grouped import (
    GroupedWeight,
    StoredGroups,
    in_eight_bits,
    in_four_bits,
    int8_groups,
    is_int8,
    stacked,
)
from cluster.models.weights import GROUPED

log = logging.getLogger(__name__)

# Of a model's weights: what is not in plain linear layers would take twice the memory.
LINEAR_SHARE = 0.99
# Rounding to 8 bits, against the exact product; a wrong instruction is off by about 1.
_TOLERANCE = 2e-2
_CHECKED_ROWS = (1, 2, 7, 13, 30)
# Bits of a weight in memory: with a scale of 16 bits for each 32 inputs, in int4 a least value too.
ROUNDED_BITS = {"int8": 8 + 16 / 32, "int4": 4 + 2 * 16 / 32}

Product = Callable[[torch.Tensor], torch.Tensor]


def may_take(config: EngineConfig, num_heads: int, layers: Sequence[LayerSpec]) -> bool:
    """True if the configuration leaves a model on a CPU to our kernels, and they attend in it.

    num_heads: of queries.  layers: what each caches."""
    if config.tensor_parallel > 1 or config.attention not in ("auto", "native"):
        return False
    native = kernels.load()  # last: a host that has no use for them compiles none
    return native is not None and all(native.attends(num_heads, layer) for layer in layers)


def can_widen(
    module: torch.nn.Module, config: EngineConfig, num_heads: int, layers: Sequence[LayerSpec]
) -> bool:
    """True if to make a bfloat16 model one of float32, which our kernels will bring back to
    bfloat16.  See `may_take`."""
    kept = {(each.dtype, each.device.type) for each in module.parameters()}
    return (
        kept == {(torch.bfloat16, "cpu")}
        and linear_share(module) >= LINEAR_SHARE
        and may_take(config, num_heads, layers)
    )


def are_same_experts(stacked: Any, experts: Experts) -> bool:
    """True if experts that stand one by one, as plain linear layers, compute what the stacked ones
    do, and our kernels can have them."""
    num_experts, _, size = stacked.gate_up_proj.shape
    dtype = stacked.gate_up_proj.dtype
    is_hooked = "forward" in vars(stacked)  # by accelerate
    if is_hooked or stacked.gate_up_proj.device.type != "cpu" or kernels.load() is None:
        return False

    def of(module: torch.nn.Module) -> Product:
        # So large that bounds within experts would show.
        return lambda rows: module(
            10.0 * rows[0],
            torch.arange(2 * rows.shape[1]).view(-1, 2) % num_experts,
            torch.tensor([0.75, 0.25]).to(dtype).expand(rows.shape[1], 2),
        )

    return agree(of(stacked), of(experts), size, _CHECKED_ROWS[:3], _TOLERANCE, dtype)


def keep_in_bf16(embedding: torch.nn.Module) -> None:
    """Keep a widened embedding's rows in bfloat16, from which they came; they are given out in
    float32."""
    if type(embedding) is not torch.nn.Embedding:
        return  # another one may scale its rows in the format that they have
    embedding.weight.data = embedding.weight.data.bfloat16()
    embedding.register_forward_hook(lambda module, ids, rows: rows.float())


def multiply_in_bf16(module: torch.nn.Module, native: Kernels) -> None:
    """Let the packed bfloat16 weights of a widened model be multiplied in bfloat16, where the
    processor does that."""
    layers = [
        child
        for child in module.modules()
        if isinstance(child, PackedLinear) and child.format == Format.BF16
    ]
    if not native.multiplies_bf16 or not layers:
        return
    first, rounded = layers[0], Format.BF16_PRODUCTS
    if _agrees(first, native, first.packed, rounded, first.forward):
        for layer in layers:
            layer.format = rounded
        log.info("products in bfloat16 count=%d", len(layers))


def multiply_in_groups(
    module: torch.nn.Module, native: Kernels, weights: Mapping[str, GroupedWeight]
) -> int:
    """Let the packed layers of a widened model multiply with these weights; returns how many do.
    All others stay as they are, and so do those behind one whose product is wrong.

    weights: by the name of the linear layer before layers were fused; a product of several layers
    needs those of all.
    """
    count = 0
    checked: set[tuple[int, int, bool]] = set()
    for layer, names in products(module):
        found = [weights[name] for name in names if name in weights]
        if layer.format != Format.BF16 or len(found) < len(names):
            continue
        weight = stacked(found)
        kind = (weight.bits, weight.group, weight.minimum is None)
        if kind not in checked:
            exact = partial(linear, weight=weight.dequantized(), bias=layer.float_bias)
            if not _agrees(layer, native, native.pack_groups(weight), Format.GROUPS, exact):
                break
            checked.add(kind)
        layer.keep_groups(weight)
        count += 1
    log.info("products in groups of few bits count=%d by=%s", count, native.products)
    return count


def _agrees(
    layer: PackedLinear, native: Kernels, packed: torch.Tensor, format: Format, exact: Product
) -> bool:
    """True if the layer's products with these weights are the exact ones but for the rounding of
    rows."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return native.linear(rows, packed, layer.float_bias, layer.out_features, format)

    return agree(exact, rounded, layer.in_features, _CHECKED_ROWS, _TOLERANCE)


def check_reproducible(
    module: torch.nn.Module,
    config: EngineConfig,
    device: torch.device,
    text_config: Any,
    layers: Sequence[LayerSpec],
) -> None:
    """Raise ConfigError, with the remedy, where `reproducible: true` cannot be had: where a row's
    bits would depend on other rows.

    A matrix product may sum in another order when it has more rows, so a step that verifies guesses
    and one that does not can differ in the last bit, and a near-tie then falls the other way.  Our
    kernels compute every row by itself, products and attention both: a row's logits depend on its
    own prefix alone, with speculation on or off, in any batch, however a prompt was cut into
    chunks.  What else a layer does (norms, rotations, activations) goes row by row as well.

    text_config: transformers' of the decoder.  layers: as probed.
    """
    native = kernels.load() if device.type == "cpu" else None
    if device.type != "cpu":
        reason = f"it is not built for {device.type} devices; set device: cpu"
    elif config.tensor_parallel > 1:
        reason = "it is for one process; set tensor_parallel: 1"
    elif config.attention not in ("auto", "native"):
        reason = f"attention {config.attention} computes rows together; use auto or native"
    elif native is None:
        reason = "it needs a C++ compiler (on Debian and Ubuntu: apt install g++)"
    elif any(each.state for each in layers):
        reason = "layers of the delta rule compute a text's rows together; serve it without"
    elif not all(native.attends(int(text_config.num_attention_heads), each) for each in layers):
        reason = (
            f"its kernels attend with heads of a multiple of {native.lanes} and up to "
            f"{native.max_sharing} query heads per key head; {type(module).__name__} has others"
        )
    elif not is_native(module):
        reason = (
            f"{type(module).__name__} multiplies with more than plain linear layers (experts "
            "with biases, quantised weights); serve it without"
        )
    else:
        return
    raise ConfigError(f"reproducible: true is refused: {reason}", param="reproducible")


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
