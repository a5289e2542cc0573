"""Reads a model's config.json, and names the key at fault where no model can be made of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cluster.config.schema import EngineConfig
from cluster.engine.attention.delta_rule import delta_layer
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.models.weights import header_of, safetensors_of

# What transformers and torch raise for values that they can make nothing of.
BAD_VALUES = (
    StrictDataclassError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
# Where one of these is a number, it is a whole one above 0.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_head",
    "n_positions",
)
# Composite models of which the text's part is served: a causal model of its own.
_BY_TEXT = frozenset(
    {"gemma3", "gemma3n", "gemma4", "mistral3", "qwen3_vl", "qwen3_5", "qwen3_5_moe"}
)
# Those whose layers of linear attention are ours (`attention/path_layers.py`).
_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# transformers has no causal model of this part; of text alone, whose three rows of positions are
# equal, it computes what this one does.
_ALIKE = {"qwen3_vl_text": "qwen3"}
# The version of transformers that knows an architecture first, of those later than our oldest.
SINCE = {"lfm3": "5.23"}
# How the weights of such a part are called, by transformers 4 or 5, and by its causal model.
_NAMES_OF_TEXT = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
}
# Libraries show what they were given, which may be long.
_MAX_REASON_LEN = 200


class Mistral4Config(transformers.Mistral4Config):  # type: ignore[misc]
    """transformers has a causal model of it and does not list that; before 5.19 it lets nobody list
    one for a class of its own."""


def cached_layers(text_config: Any, dtype: torch.dtype) -> list[LayerSpec]:
    """What the layers of the model cache on a CPU, but for those that share another's; those that
    attend, as if they had no window."""
    count = int(text_config.num_hidden_layers) - (
        getattr(text_config, "num_kv_shared_layers", None) or 0
    )
    own = getattr(text_config, "per_layer_config", None) or [text_config] * count
    layers = [_cached(each, dtype) for each in own[:count]]
    followed = followed_layers(text_config)
    if not followed:
        return layers
    if text_config.model_type in _DELTA:
        special = delta_layer(
            text_config.linear_num_key_heads,
            text_config.linear_key_head_dim,
            text_config.linear_num_value_heads,
            text_config.linear_value_head_dim,
            text_config.linear_conv_kernel_dim,
            layers[0],
        )
    else:
        size, kernel = int(text_config.hidden_size) // 2, text_config.conv_L_cache
        special = LayerSpec(1, size, dtype, torch.device("cpu"), kernel, is_convolution=True)
    kinds = zip(text_config.layer_types, layers, strict=True)
    return [special if kind in followed else each for kind, each in kinds]


def followed_layers(text_config: Any) -> dict[str, str]:
    """The types of layers that follow a row's path without being attention, and what they are."""
    if getattr(text_config, "conv_L_cache", None):
        return {"conv": "convolutions"}  # of so many tokens, which are kept one by one
    is_delta = text_config.model_type in _DELTA
    return {"linear_attention": "delta layers"} if is_delta else {}


def _cached(text_config: Any, dtype: torch.dtype) -> LayerSpec:
    latent = getattr(text_config, "kv_lora_rank", None)
    if latent:
        size = (latent + text_config.qk_rope_head_dim) // 2
        return LayerSpec(1, size, dtype, torch.device("cpu"), is_latent=True)
    heads = int(text_config.num_attention_heads)
    kv_heads = int(getattr(text_config, "num_key_value_heads", None) or heads)
    head_dim = getattr(text_config, "head_dim", None) or int(text_config.hidden_size) // heads
    return LayerSpec(kv_heads, int(head_dim), dtype, torch.device("cpu"))


def read_model_config(folder: Path, config: EngineConfig) -> Any:
    """transformers' configuration of the model in `folder`; raises ConfigError with the key that
    is at fault."""
    described = _described(folder)
    text = described.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise _refusal(folder, f"{text!r} is no JSON object", ["text_config"])
    for part in (described, text or {}):
        _check_counts(folder, part)
    _check_known(described.get("model_type"))
    with _told(folder, described, _parsed):
        try:
            return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        except OSError as error:
            raise ConfigError(
                f"model {config.model!r}: its config cannot be read: {error}", param="model"
            ) from error


def served_part(whole: Any) -> Any:
    """The configuration that a model is served by: of some composite models that of their text,
    with what theirs says of all weights; of all others their own."""
    if whole.model_type not in _BY_TEXT:
        return whole
    text = whole.get_text_config(decoder=True)
    alike = _ALIKE.get(text.model_type)
    if alike is not None:
        text = CONFIG_MAPPING[alike].from_dict({**text.to_dict(), "model_type": alike})
    if text.model_type == "mistral4":
        text.__class__ = Mistral4Config
        AutoModelForCausalLM.register(
            Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
        )
    for name in ("dtype", "tie_word_embeddings", "quantization_config"):
        if getattr(whole, name, None) is not None:
            setattr(text, name, getattr(whole, name))
    return text


def names_of_weights(model_type: str) -> dict[str, str] | None:
    """What to put for what in the names of stored weights, None for models that are served whole.

    model_type: of the whole model."""
    return _NAMES_OF_TEXT if model_type in _BY_TEXT else None


def name_in_text(name: str, names: dict[str, str] | None) -> str:
    """The name of a weight or layer in the model that is served.  names: `names_of_weights`."""
    for former, ours in (names or {}).items():
        name = re.sub(former, ours, name)
    return name


def quantised_by(model_config: Any, config: EngineConfig) -> Any:
    """The method by which a model's weights are quantised, as configured or as stored; None = by
    none.  model_config: transformers' of what is served."""
    return config.quantization or getattr(model_config, "quantization_config", None)


def built(folder: Path, model_config: Any, config: EngineConfig) -> torch.nn.Module | None:
    """The model without memory for its weights, of which none is read.  Raises ConfigError where
    transformers cannot build what config.json describes, or the weights have other shapes.

    None for quantised models, whose quantiser changes the layers.
    """
    if quantised_by(model_config, config) is not None:
        return None
    described = _described(folder)
    with _told(folder, described, lambda changed: without_weights(served_part(_parsed(changed)))):
        module: torch.nn.Module = without_weights(model_config)
    _compare(folder, described, module)
    return module


def _compare(folder: Path, described: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Raise ConfigError unless the weights, by their files' headers, are those of `module`."""
    wanted = dict(module.named_parameters(remove_duplicate=False))
    names = names_of_weights(described["model_type"])
    stored: set[str] = set()
    for path in safetensors_of(folder):
        for whole, header in header_of(path).items():
            name = name_in_text(whole, names)
            if names is not None and name == whole and not name.startswith("lm_head."):
                continue  # of images
            stored.add(name)
            shape = tuple(header["shape"])
            if name in wanted and tuple(wanted[name].shape) != shape:
                raise _refusal(
                    folder,
                    f"by it {name} has the shape {list(wanted[name].shape)}, in "
                    f"{path.name} it has {list(shape)}",
                    _keys_of(described, wanted[name].shape, shape),
                )
    # transformers renames some architectures' weights while it loads them: then names say nothing.
    stored -= {name for name, _ in module.named_buffers()}
    if not stored or not stored <= set(wanted):
        return
    held = {id(wanted[name]) for name in stored}  # of tied weights one is enough
    absent = [name for name, each in wanted.items() if id(each) not in held]
    if absent:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the weights that its config.json describes, "
            f"{absent[0]} among them; copy or download the whole folder again",
            param="model",
        )


def _described(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _refusal(folder, f"it cannot be read ({error})") from error
    if not isinstance(described, dict):
        raise _refusal(folder, "it is no JSON object")
    return described


def _check_counts(folder: Path, described: Mapping[str, Any]) -> None:
    for key in _COUNTS:
        value = described.get(key)
        if value is None or isinstance(value, list | dict):
            continue  # the architecture's default, or one for each layer
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _refusal(folder, f"{value!r} is no whole number above 0", [key])
    heads, groups = (described.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        reason = f"{groups} do not divide the {heads} num_attention_heads"
        raise _refusal(folder, reason, ["num_key_value_heads"])


def _check_known(model_type: object) -> None:
    """Raise ConfigError, with the version needed, for an architecture that came later."""
    needed = SINCE.get(str(model_type))
    if needed is not None and model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{model_type} cannot be served: transformers knows it since {needed}, and "
            f"{transformers.__version__} is installed; upgrade transformers",
            param="model",
        )


def _parsed(described: Mapping[str, Any]) -> Any:
    return CONFIG_MAPPING[described["model_type"]].from_dict(dict(described))


def without_weights(model_config: Any, **given: torch.dtype) -> Any:
    """transformers' model without memory for its weights.

    given: `dtype`, in place of the configuration's own."""
    with torch.device("meta"):
        # transformers writes the dtype into the configuration that it is given.
        own = copy.deepcopy(model_config)
        return AutoModelForCausalLM.from_config(own, trust_remote_code=False, **given)


@contextmanager
def _told(
    folder: Path, described: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], object]
) -> Iterator[None]:
    """Inside, what a library raises becomes a ConfigError that names the key.

    attempt: does the same with another description.
    """
    try:
        yield
    except BAD_VALUES as error:
        reason, keys = reason_of(error), keys_in(str(error), described)
        if not keys and not _succeeds(attempt, described):
            keys = [key for key in described if _succeeds(attempt, _without(described, key))]
        raise _refusal(folder, reason, keys) from error


def reason_of(error: Exception) -> str:
    """A library's words about a bad value, short and on one line."""
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, StrictDataclassError):
        told = str(error.__cause__ or error)
    told = " ".join(told.split())
    return told if len(told) <= _MAX_REASON_LEN else told[:_MAX_REASON_LEN] + "..."


def keys_in(text: str, described: Mapping[str, Any]) -> list[str]:
    """The keys of a description that a text names, as words or as they are written."""
    return [key for key in described if key in text or key.replace("_", " ") in text]


def _without(described: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name != key}


def _succeeds(attempt: Callable[[Mapping[str, Any]], object], described: Mapping[str, Any]) -> bool:
    try:
        attempt(described)
    except BAD_VALUES:
        return False
    return True


def _keys_of(
    described: Mapping[str, Any], wanted: Sequence[int], found: Sequence[int]
) -> list[str]:
    """The keys from which the sizes come that differ."""
    sizes = {size for size in wanted if size not in found}
    return [key for key, value in described.items() if type(value) is int and value in sizes]


def _refusal(folder: Path, reason: str, keys: list[str] | None = None) -> ConfigError:
    named = f"{', '.join(keys)}: " if keys else ""
    return ConfigError(
        f"{folder / 'config.json'}: {named}{reason}; correct it, or copy the model's file again",
        param="model",
    )
