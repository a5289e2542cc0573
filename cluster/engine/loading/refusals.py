"""Architectures the engine cannot serve, recognised by their configuration before they load.

What cannot be told from a configuration is found by the self-check after loading
(`cluster.engine.loading.self_check`), which compares tree attention with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cluster.errors import ConfigError

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Where configurations list the kinds of their layers.
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
_OTHER_WORDS = frozenset({"attention"})  # full attention, as some of these lists call it
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
    recurrent = sorted(layer_types & _RECURRENT_LAYER_TYPES)
    if recurrent:
        return f"its layers of type {', '.join(recurrent)} keep {_RECURRENT}"
    if getattr(model_class, "_is_stateful", False):
        return f"it keeps {_RECURRENT}"
    unknown = sorted(layer_types - _SERVED_LAYER_TYPES - _OTHER_WORDS)
    if unknown:
        return f"its layers are of type {', '.join(unknown)}, which the engine does not know"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) is not supported"
    if getattr(config, "attention_chunk_size", None):
        return "chunked attention is not supported"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values with one another"
    if model_class is None:
        return "transformers knows no causal language model for it"
    if not getattr(model_class, "_supports_attention_backend", False) and not _reaches_interface(
        model_class
    ):
        return "its attention cannot be replaced through transformers' AttentionInterface"
    return None


def _reaches_interface(model_class: Any) -> bool:
    """True if the modelling code looks attention functions up by name, whatever it declares."""
    check = getattr(model_class, "_can_set_attn_implementation", None)
    return bool(check is not None and check())


def check_splittable(config: Any, tensor_parallel: int) -> None:
    """Raise ConfigError unless every rank gets whole key-value heads by transformers' plan."""
    if tensor_parallel == 1:
        return
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel {tensor_parallel}: {config.model_type} has {heads} key-value heads, "
            "which do not divide evenly; choose a divisor",
            param="tensor_parallel",
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"tensor_parallel {tensor_parallel}: transformers has no tensor-parallel plan for "
            f"{config.model_type}; use tensor_parallel: 1",
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
