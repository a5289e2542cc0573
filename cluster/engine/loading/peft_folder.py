"""Reads LoRA adapters from folders as peft saves them; nothing in a folder is ever run.

Whatever would make the adapted model another than the one that is computed here (peft's variants
of LoRA, weights beside the low-rank pairs) is refused by name: unknown settings as well, unless
they are switched off.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from cluster.config.schema import EngineConfig
from cluster.engine.loading.model_config import name_in_text, names_of_weights, read_model_config
from cluster.errors import ConfigError, reason_of
from cluster.models.resolve import resolve
from cluster.records import record

_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# The first and last layer of a model, as peft tells them.
_EMBEDDING = re.compile(r"\.(embed_tokens|lm_head)(\.base_layer)?\.weight$")
# Settings that are read, or change nothing here: what they did, the weights show.
_KNOWN = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Hex digits: 64 bits, for the adapters that have one name.
_DIGEST_LEN = 16
# Ways of drawing the first weights.  Others (pissa, olora, corda) change the model's own as well.
_FIRST_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")


@record
class LowRank:
    """An addition to a linear layer's output for rows x: x down^T up^T.

    down: [rank, in_features].  up: [out_features, rank], peft's scaling included.
    """

    down: torch.Tensor
    up: torch.Tensor

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


@record
class AdapterFolder:
    """The contents of a folder.

    digest: hex digits that another content would not have.  pairs: by the names of the model's
    layers.
    """

    digest: str
    pairs: Mapping[str, LowRank]


def read_adapters(config: EngineConfig) -> dict[str, AdapterFolder]:
    """The configured adapters by name.

    Raises ConfigError, with the adapter's name and the reason."""
    if config.adapters and (config.tensor_parallel > 1 or config.reproducible):
        what = "reproducible" if config.reproducible else "tensor_parallel"
        raise ConfigError(
            f"adapters cannot be combined with {what} {getattr(config, what)}; remove one of the "
            "two",
            param="adapters",
        )
    return {name: _read(name, Path(folder), config) for name, folder in config.adapters.items()}


def refused(name: str, reason: str) -> ConfigError:
    """The error for an adapter that cannot be served."""
    return ConfigError(f"adapter {name!r} cannot be served: {reason}", param=f"adapters.{name}")


def _read(name: str, folder: Path, config: EngineConfig) -> AdapterFolder:
    settings = _settings(name, folder / _SETTINGS)
    try:
        # Read once: the digest is that of the weights that are used, whoever writes meanwhile.
        data = (folder / _WEIGHTS).read_bytes()
        tensors = load(data)
    except (OSError, SafetensorError) as error:
        raise refused(
            name,
            f"{folder / _WEIGHTS} cannot be read ({reason_of(error)}); save it with safetensors",
        ) from error
    # Trained on the whole of a composite model, of which the text's part is served.
    names = None
    if "language_model." in "".join(tensors):
        names = names_of_weights(read_model_config(resolve(config.model), config).model_type)
    downs: dict[str, torch.Tensor] = {}
    ups: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None:
            raise refused(name, _why_foreign(key))
        side = downs if found[2] == "A" else ups
        side[name_in_text(found[1], names)] = tensor
    if not downs:
        raise refused(name, f"{folder / _WEIGHTS} has no weights")
    pairs: dict[str, LowRank] = {}
    for layer in sorted({*downs, *ups}):
        if layer not in downs or layer not in ups:
            raise refused(name, f"layer {layer!r} has but one of lora_A and lora_B")
        pairs[layer] = _pair(name, layer, downs[layer], ups[layer], settings)
        if pairs[layer].rank > config.max_adapter_rank:
            raise refused(
                name,
                f"layer {layer!r} has rank {pairs[layer].rank}, the limit is "
                f"{config.max_adapter_rank}; raise engine.max_adapter_rank",
            )
    told = json.dumps(settings, sort_keys=True).encode()
    digest = hashlib.sha256(len(told).to_bytes(8, "little") + told + data).hexdigest()
    return AdapterFolder(digest[:_DIGEST_LEN], pairs)


def _why_foreign(key: str) -> str:
    """The reason why a weight that is no half of a pair cannot be served, and a remedy if any."""
    if ".lora_" not in key and _EMBEDDING.search(key):
        return (
            f"its weight {key!r} is a whole embedding layer, which peft adds where lm_head or "
            "embed_tokens is adapted; if it is the base model's own, save the adapter by "
            "save_pretrained(folder, save_embedding_layers=False)"
        )
    return f"its weight {key!r} is no part of plain LoRA on linear layers"


def _pair(
    name: str, layer: str, down: torch.Tensor, up: torch.Tensor, settings: Mapping[str, Any]
) -> LowRank:
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1] or not len(down):
        raise refused(
            name,
            f"lora_A of {tuple(down.shape)} and lora_B of {tuple(up.shape)} of layer {layer!r} are "
            "no pair",
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise refused(name, f"weights of layer {layer!r} are not finite")
    rank = down.shape[0]
    divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
    return LowRank(down, up.float() * (float(settings["lora_alpha"]) / divisor))


def _settings(name: str, file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refused(
            name, f"{file} cannot be read ({reason_of(error)}); give a folder of peft's"
        ) from error
    if not isinstance(found, dict):
        raise refused(name, f"{file} is no mapping")
    if found.get("peft_type") != "LORA":
        raise refused(name, f"peft_type is {found.get('peft_type')!r}; only LORA is served")
    if found.get("bias", "none") != "none":
        raise refused(name, f"bias is {found['bias']!r}; only 'none' is served")
    if found.get("init_lora_weights") not in _FIRST_WEIGHTS:
        raise refused(
            name,
            f"init_lora_weights is {found['init_lora_weights']!r}, which changes the model's own "
            "weights; save it converted to plain LoRA",
        )
    alpha = found.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise refused(name, f"lora_alpha is {alpha!r}; it must be a number")
    for key, value in found.items():
        if value and key not in _KNOWN:
            raise refused(name, f"{key} is {value!r}, which is not served")
    return found
