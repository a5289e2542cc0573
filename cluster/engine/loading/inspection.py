"""A model's description before its weights are loaded, and the refusals that need no weights.

`load_model` begins with these rules, and `drafthouse check` consists of them.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import AutoQuantizationConfig, get_hf_quantizer

from cluster.config.schema import EngineConfig
from cluster.engine.adapters import check_fits
from cluster.engine.attention.backends import check_name
from cluster.engine.cpu import kernels
from cluster.engine.cpu.narrow import (
    check_few_bits,
    computed_instead,
    may_stay_narrow,
    planned_weights,
)
from cluster.engine.device import MachinePaths, check_can_compile, resolve_device
from cluster.engine.loading.model_config import (
    built,
    cached_layers,
    followed_layers,
    names_of_weights,
    read_model_config,
    served_part,
)
from cluster.engine.loading.peft_folder import read_adapters
from cluster.errors import ConfigError
from cluster.models.weights import check_weights
from cluster.records import record

# Architectures the engine cannot serve, recognised by their configuration before they load.  What
# cannot be told from one is found by the self-check after loading
# (`cluster.engine.loading.self_check`), which compares tree attention with the model's own
# forward.


# Where configurations list the kinds of their layers; some call full attention but that.
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
# One state stands for all tokens: it cannot be several drafts' at a time, nor be taken back when
# a draft is rejected.
_RECURRENT = (
    "a recurrent state of all tokens before (a state-space model, linear attention, or a "
    "convolution) instead of keys per token"
)
_RECURRENT_LAYER_TYPES = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
)
# Rotary tables of these kinds depend on the longest position of a batch once the original length
# is exceeded: a row's result would depend on its neighbours, and cached keys would be stale.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_servable(config: Any, model_class: Any, whole: Any = None) -> None:
    """Raise ConfigError, naming the architecture and the reason, if it cannot be served.

    config: the transformers text config.  model_class: what AutoModelForCausalLM would build.
    whole: the config of a model of which the text's is a part.
    """
    reason = _reason(config, model_class)
    if reason is not None:
        whole = whole or config
        name = getattr(model_class, "__name__", None) or type(whole).__name__
        raise ConfigError(
            f"{name} (model_type {whole.model_type!r}) cannot be served: {reason}; use a decoder "
            "with full or sliding-window attention, such as Llama, Qwen3 or Mistral",
            param="model",
        )


def _reason(config: Any, model_class: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    layer_types = {str(kind) for name in _LAYER_LISTS for kind in getattr(config, name, None) or ()}
    followed = followed_layers(config)
    layer_types -= followed.keys()
    recurrent = sorted(layer_types & _RECURRENT_LAYER_TYPES)
    if recurrent:
        return f"its layers of type {', '.join(recurrent)} keep {_RECURRENT}"
    if getattr(model_class, "_is_stateful", False) and not followed:
        return f"it keeps {_RECURRENT}"
    unknown = sorted(layer_types - _SERVED_LAYER_TYPES)
    if unknown:
        return f"its layers are of type {', '.join(unknown)}, which the engine does not know"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention is not supported"
    if model_class is None:
        return "transformers knows no causal language model for it"
    # By what the class declares, or by its code.
    if not (model_class._supports_attention_backend or model_class._can_set_attn_implementation()):
        return "its attention cannot be replaced through transformers' AttentionInterface"
    return None


def check_splittable(config: Any, tensor_parallel: int) -> None:
    """Raise ConfigError unless every rank gets whole key-value heads by transformers' plan."""
    if tensor_parallel == 1:
        return
    latents = ["latents"] if getattr(config, "kv_lora_rank", None) else []
    for kind in [*followed_layers(config).values(), *latents]:
        raise ConfigError(
            f"tensor_parallel {tensor_parallel}: the {kind} of {config.model_type} are not "
            "split; use tensor_parallel: 1, over several GPUs with device_map: auto",
            param="tensor_parallel",
        )
    counts = {each.num_kv_heads for each in cached_layers(config, torch.float32)}
    for heads in filter(lambda count: count % tensor_parallel, counts):
        raise ConfigError(
            f"tensor_parallel {tensor_parallel}: {config.model_type} has {heads} key-value heads, "
            "which do not divide evenly; choose a divisor",
            param="tensor_parallel",
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"tensor_parallel {tensor_parallel}: transformers has no tensor-parallel plan for "
            f"{config.model_type}; use tensor_parallel: 1, over several GPUs with device_map: auto",
            param="tensor_parallel",
        )


def context_limit(config: Any, asked: int) -> int:
    """max_context_len: `asked`, or the model's own limit where that is 0."""
    stated = getattr(config, "max_position_embeddings", None)
    limit = int(stated or getattr(config, "n_positions", None) or 0)
    for rope in _ropes(config):
        kind = str(rope.get("rope_type") or rope.get("type"))
        if kind not in _LENGTH_DEPENDENT_ROPE:
            continue
        original = int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or limit
        )
        if asked > original:
            raise ConfigError(
                f"max_context_len {asked}: the model's {kind} rotary embedding depends on the "
                f"batch beyond {original} tokens; set at most {original}",
                param="max_context_len",
            )
        limit = min(limit or original, original)
    if not asked and not limit:
        raise ConfigError(
            f"{config.model_type} states no limit of its context; set max_context_len",
            param="max_context_len",
        )
    if asked and limit and asked > limit:
        raise ConfigError(
            f"max_context_len {asked} exceeds the model's own limit of {limit}; lower it",
            param="max_context_len",
        )
    return asked or limit


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every setting of a rotary embedding: one for all layers, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, Mapping):
            yield settings
            yield from (each for each in settings.values() if isinstance(each, Mapping))


# By transformers' method: the package that it asks for at the first forward, and no sooner.
_FORWARD_NEEDS = {"fp8": "kernels", "mxfp8": "kernels"}

# The smallest sizes with which a model can be served, those that the check at load needs: slots of
# the cache, positions, and rows of one step.
MIN_SLOTS = 16
MIN_ROWS = 8


def check_sizes(config: EngineConfig, max_context_len: int, num_pages: int) -> None:
    """Raise ConfigError for sizes with which nothing could be served.

    num_pages: 0 = not known before the model is loaded.
    """
    sizes = [
        ("max_batch_tokens", config.max_batch_tokens, MIN_ROWS),
        ("max_context_len", max_context_len, MIN_SLOTS),
    ]
    if num_pages:
        sizes.append(("num_pages", num_pages, -(-MIN_SLOTS // config.page_size)))
    for name, value, least in sizes:
        if value < least:
            raise ConfigError(
                f"{name} is {value}, which is too small to serve anything; raise it to at "
                f"least {least}",
                param=name,
            )


@record
class Description:
    """A model's configuration.  config: transformers' of what is served, text_config: of its
    decoder.  max_context_len: as configured, or the model's own limit.  names: see
    `names_of_weights`.  weights: a line on their format, "" = as the configuration's dtype says."""

    config: Any
    text_config: Any
    architecture: str
    vocab_size: int
    max_context_len: int
    names: dict[str, str] | None
    weights: str = ""


def describe(folder: Path, config: EngineConfig) -> Description:
    """Read the configuration of the model in `folder`.

    Raises ConfigError, with the remedy, if its architecture or the configured sizes cannot be
    served.
    """
    whole = read_model_config(folder, config)
    model_config = served_part(whole)
    text_config = model_config.get_text_config(decoder=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    check_servable(text_config, model_class, whole)
    check_splittable(text_config, config.tensor_parallel)
    max_context_len = context_limit(text_config, config.max_context_len)
    check_sizes(config, max_context_len, config.num_pages)
    return Description(
        config=model_config,
        text_config=text_config,
        architecture=getattr(model_class, "__name__", type(model_config).__name__),
        vocab_size=int(text_config.vocab_size),
        max_context_len=max_context_len,
        names=names_of_weights(whole.model_type),
    )


def check_loadable(folder: Path, config: EngineConfig, *, is_here: bool) -> Description:
    """Describe the model in `folder`; raise ConfigError for whatever load would refuse of it.

    is_here: it is to run on this machine, so its device must exist and the packages be installed.
    """
    described = describe(folder, config)
    check_name(config.attention)
    adapters = read_adapters(config)
    if config.quantization is not None:
        quantization_of(config)
    device, widened = resolve_device(config.device) if is_here else None, ""
    if device is not None:
        check_few_bits(config, device)
        widened = check_packages(described, config)
        if device.type == "cuda" and config.attention in ("auto", "triton"):
            check_can_compile(MachinePaths())
    check_weights(folder)
    module = built(folder, described.config, config)
    if module is not None:
        check_fits(module, adapters)
    if module is None or (device is not None and device.type != "cpu"):
        return replace(described, weights=widened)
    if device is not None and not may_stay_narrow(config, device, described.config):
        weights = computed_instead(folder, config, device, is_widened=False)
    else:
        native = kernels.load() if device is not None else None
        products = "" if native is None else native.products
        weights = planned_weights(folder, module, config, products)
    return replace(described, weights=widened or weights)


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


def check_packages(described: Description, config: EngineConfig) -> str:
    """Raise ConfigError, naming the package, for a quantised model that this machine cannot unpack
    or multiply; returns a line on weights that transformers widens, "" = none."""
    wanted = None if config.quantization is None else quantization_of(config)
    param = "model" if wanted is None else "quantization"
    model_config = copy.deepcopy(described.config)  # transformers writes into it
    try:
        quantizer, *_ = get_hf_quantizer(model_config, wanted, config.device_map, None, {})
    except (ImportError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"its quantised weights cannot be loaded here: {error}{_remedy(error)}",
            param=param,
        ) from error
    method = getattr(quantizer, "quantization_config", None)
    name = getattr(method, "quant_method", "")
    name = getattr(name, "value", name)
    package = _FORWARD_NEEDS.get(name)
    is_widened = getattr(method, "dequantize", False)
    if package is not None and not is_widened and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"its quantised weights are multiplied by the package {package}, which is missing "
            f"here; install it (pip install {package}), or name a checkpoint in bfloat16",
            param=param,
        )
    if not is_widened:
        return ""
    return (
        f"weights {name} are widened to bfloat16 by transformers, which multiplies them as they "
        "are with the package kernels and Triton alone"
    )


def _remedy(error: Exception) -> str:
    """An end for messages about a package that is missing."""
    is_told = "pip install" in str(error)
    return "; install that package" if isinstance(error, ImportError) and not is_told else ""
