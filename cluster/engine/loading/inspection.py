"""A model's description before its weights are loaded, and the refusals that need no weights.

`load_model` begins with these rules, and `drafthouse check` consists of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AutoQuantizationConfig, get_hf_quantizer

from cluster.config.schema import EngineConfig
from cluster.engine.adapters import check_fits
from cluster.engine.attention.backends import check_name
from cluster.engine.device import computes, resolve_device
from cluster.engine.loading.few_bits import check_few_bits, computed_instead, planned_weights
from cluster.engine.loading.model_config import built, read_model_config
from cluster.engine.loading.peft_folder import read_adapters
from cluster.engine.loading.refusals import check_servable, check_splittable, context_limit
from cluster.engine.loading.sizes import check_sizes
from cluster.engine.nvidia import Machine, check_can_compile
from cluster.errors import ConfigError
from cluster.models.weights import check_weights
from cluster.records import record


@record
class Description:
    """A model's configuration.  config: transformers' of the whole model, text_config: of its
    decoder.  max_context_len: as configured, or the model's own limit.  weights: a line on their
    format, "" = as the configuration's dtype says."""

    config: Any
    text_config: Any
    architecture: str
    vocab_size: int
    max_context_len: int
    weights: str = ""


def describe(folder: str, config: EngineConfig) -> Description:
    """Read the configuration of the model in `folder`.

    Raises ConfigError, with the remedy, if its architecture or the configured sizes cannot be
    served.
    """
    model_config = read_model_config(Path(folder), config)
    text_config = model_config.get_text_config(decoder=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    check_servable(text_config, model_class, model_config)
    check_splittable(text_config, config.tensor_parallel)
    max_context_len = context_limit(text_config, config.max_context_len)
    check_sizes(config, max_context_len, config.num_pages)
    return Description(
        config=model_config,
        text_config=text_config,
        architecture=getattr(model_class, "__name__", type(model_config).__name__),
        vocab_size=int(text_config.vocab_size),
        max_context_len=max_context_len,
    )


def check_loadable(folder: Path, config: EngineConfig, *, is_here: bool) -> Description:
    """Describe the model in `folder`; raise ConfigError for whatever load would refuse of it.

    is_here: it is to run on this machine, so its device must exist and the packages be installed.
    """
    described = describe(str(folder), config)
    check_name(config.attention)
    adapters = read_adapters(config)
    if config.quantization is not None:
        quantization_of(config)
    device = resolve_device(config.device) if is_here else None
    if device is not None:
        check_few_bits(config, device)
        check_compile(config, device)
        if device.type == "cuda" and config.attention in ("auto", "triton"):
            check_can_compile(Machine())
        _check_packages(described, config)
    check_weights(folder)
    module = built(folder, described.config, config)
    if module is not None:
        check_fits(module, adapters)
    if module is None or (device is not None and device.type != "cpu"):
        return described
    weights = planned_weights(folder, module, config)
    if device is not None and not computes(torch.bfloat16):
        stored = getattr(described.text_config, "dtype", None)
        weights = computed_instead(folder, config, device, stored, is_widened=False)
    return replace(described, weights=weights)


def check_compile(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError where `compile` is asked for and cannot be had."""
    if config.compile and (
        device.type != "cpu" or config.tensor_parallel > 1 or config.device_map is not None
    ):
        raise ConfigError(
            f"compile is for one process on a CPU, not for {device} with tensor_parallel "
            f"{config.tensor_parallel} and device_map {config.device_map}; remove it",
            param="compile",
        )


def quantization_of(config: EngineConfig) -> Any:
    """transformers' quantisation config of the configured method; raises ConfigError."""
    fields = dict(config.quantization or {})
    if "quant_method" not in fields:
        raise ConfigError(
            "quantization lacks quant_method; name one, for instance torchao or bitsandbytes",
            param="quantization.quant_method",
        )
    try:
        return AutoQuantizationConfig.from_dict(fields)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(
            f"quantization {fields['quant_method']!r} is refused by transformers: {error}"
            f"{_remedy(error)}",
            param="quantization",
        ) from error


def _check_packages(described: Description, config: EngineConfig) -> None:
    """Raise ConfigError for a quantised model that this machine cannot unpack."""
    wanted = None if config.quantization is None else quantization_of(config)
    try:
        get_hf_quantizer(described.config, wanted, config.device_map, None, {})
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"its quantised weights cannot be loaded here: {error}{_remedy(error)}",
            param="model" if wanted is None else "quantization",
        ) from error


def _remedy(error: Exception) -> str:
    """An end for messages about a package that is missing."""
    is_told = "pip install" in str(error)
    return "; install that package" if isinstance(error, ImportError) and not is_told else ""
