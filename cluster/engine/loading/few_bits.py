"""Linear layers' weights in few bits, on a CPU: which are wanted of a model, and which it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu.kernels import Kernels
from cluster.engine.cpu.narrow import LINEAR_SHARE, multiply_in_bf16, multiply_in_groups
from cluster.engine.cpu.packed_linear import PackedLinear, is_packable, plain_share
from cluster.engine.device import computes, resolve_dtype
from cluster.engine.loading.renumbered import Numbering
from cluster.errors import ConfigError
from cluster.models.grouped import GroupedWeight, StoredGroups, in_four_bits
from cluster.models.int8 import is_int8
from cluster.models.weights import GROUPED

_NO_PRODUCTS = "this processor does not multiply bfloat16"


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


def weights_dtype(
    config: EngineConfig, device: torch.device, stored: torch.dtype | None
) -> torch.dtype | str:
    """transformers' `dtype` argument; weights with a format of their own are taken as bfloat16."""
    is_auto = config.dtype == "auto" and device.type == "cpu"
    if is_auto and config.weights != "auto" and computes(torch.bfloat16):
        return torch.bfloat16
    return resolve_dtype(config.dtype, device, stored)


class FewBits:
    """The weights in few bits that a loaded model is to have, made before they are packed."""

    def __init__(
        self, module: Any, config: EngineConfig, folder: Path, numbering: Numbering | None
    ) -> None:
        self.format = wanted_format(folder, config)
        self._is_output_wide = config.output_weights == "bf16"
        self._groups: Mapping[str, GroupedWeight] = {}
        # A file's groups are of the output layer's own rows.
        is_wide = self._is_output_wide or (numbering is not None and self.format == "stored")
        wide = module.get_output_embeddings() if is_wide else None
        left_out = {name for name, layer in module.named_modules() if layer is wide}
        if self.format == "stored":
            self._groups = StoredGroups(folder, left_out)
        elif self.format == "int4":
            self._groups = {
                name: weight
                for name, layer in module.named_modules()
                if name not in left_out
                and is_packable(layer)
                and (weight := in_four_bits(layer.weight, config.weights_group)) is not None
            }

    def multiply(self, module: Any, native: Kernels) -> None:
        """Let the packed layers of a widened model multiply with them, all others in bfloat16."""
        multiply_in_groups(module, native, self._groups)
        wide = module.get_output_embeddings() if self._is_output_wide else None
        multiply_in_bf16(module, native, is_int8=self.format == "int8", wide=wide)


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
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    stored: torch.dtype | None,
    *,
    is_widened: bool,
) -> str:
    """Return a line on what is computed in place of the format that a model is to have; "" = that.

    To be asked of a model that has no weights in few bits, or will have none.  stored: its dtype.
    is_widened: our kernels compute it, in bfloat16."""
    is_cpu, has_products = device.type == "cpu", computes(torch.bfloat16)
    is_other = config.dtype != "auto" or not is_cpu or config.tensor_parallel > 1
    if is_other and config.weights == "auto":
        return ""
    wanted = wanted_format(folder, config)
    if wanted == "bf16":
        is_wider = stored == torch.bfloat16 and is_cpu and not has_products
        return f"products are in float32: {_NO_PRODUCTS}" * (is_wider and config.dtype == "auto")
    reason = (
        _NO_PRODUCTS + " as it should" * has_products
        if is_widened or not has_products
        else "our kernels (which need a C++ compiler) take models of plain linear layers, in "
        "bfloat16 and not compiled"
    )
    what = "the file's weights in few bits" if wanted == "stored" else f"weights {wanted}"
    return f"{what} are widened to bfloat16: {reason}"


def planned_weights(folder: Path, module: torch.nn.Module, config: EngineConfig) -> str:
    """A line on the weights of a model that is to be loaded on a CPU that multiplies bfloat16.

    module: without weights."""
    wanted, share = wanted_format(folder, config), plain_share(module)
    if wanted == "bf16":
        return ""
    if share < LINEAR_SHARE:
        return (
            f"weights stay in bfloat16, not {wanted}: {share:.0%} of them are in plain linear "
            "layers, the rest in experts and the like"
        )
    words = {
        "stored": "as the file stores them, in groups of few bits",
        "int8": "in int8, one scale for each output",
        "int4": f"in int4, in groups of {config.weights_group} inputs",
    }
    output = ", the output layer's in bfloat16" * (config.output_weights == "bf16")
    return f"weights {words[wanted]}{output}, where the CPU multiplies bfloat16"
