"""Models at their true configurations, and what each of their layers attends with."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING

from cluster.engine.decoder import is_known
from cluster.engine.types import LayerSpec
from cluster.records import frozen

# As the models' public config.json has them.
CONFIGS = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))


def config_of(name: str, num_layers: int | None = None) -> Any:
    """transformers' configuration.  num_layers: so many, the kinds of the model's own taking
    turns; None = the model's own."""
    config = AutoConfig.for_model(**CONFIGS[name])
    config.dtype = torch.bfloat16
    if num_layers is not None:
        kinds = dict.fromkeys(kinds_of(config))
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = list(islice(cycle(kinds), num_layers))
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
    return config


def kinds_of(config: Any) -> list[str]:
    """The kind of each layer, as transformers names it."""
    named = getattr(config, "layer_types", None)
    alike = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return list(named or [alike] * config.num_hidden_layers)


def layers_of(config: Any, device: torch.device) -> tuple[LayerSpec, ...]:
    """What each layer caches."""
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    kv_heads, head_dim = config.num_key_value_heads, head_dim_of(config)
    return tuple(
        LayerSpec(kv_heads, head_dim, config.dtype, device, windows[kind])
        for kind in kinds_of(config)
    )


def head_dim_of(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


@frozen
class Attending:
    """What the attention kernels are compiled for, besides their tiles."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    sinks: bool
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None

    @classmethod
    def of(cls, name: str) -> list[Attending]:
        """Of each kind of layer of a model."""
        config = config_of(name)
        # gpt-oss has them, and no configuration says so.
        sinks = config.model_type == "gpt_oss"
        layers = dict.fromkeys(layers_of(config, torch.device("cpu")))
        return [
            cls(config.num_attention_heads, each.num_kv_heads, each.head_dim, each.window, sinks)
            for each in layers
        ]


@frozen
class Between:
    """What the kernels between a layer's products are compiled for.  norms: of queries and keys."""

    size: int
    inner_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norms: bool
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, name: str) -> list[Between]:
        """Of a model whose layers are fused; none of others."""
        config = config_of(name)
        if not is_known(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]):
            return []
        heads = config.num_attention_heads, config.num_key_value_heads, head_dim_of(config)
        has_norms = config.model_type == "qwen3"
        return [cls(config.hidden_size, config.intermediate_size, *heads, has_norms)]
