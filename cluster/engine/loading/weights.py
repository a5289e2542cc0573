"""A checkpoint's weights, brought by transformers into the model that its configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from cluster.config.schema import EngineConfig
from cluster.engine.attention import seam
from cluster.engine.loading import inspection
from cluster.engine.loading.model_config import BAD_VALUES
from cluster.errors import ConfigError
from cluster.models.int8 import load_int8

_LOADING_ERRORS = (*BAD_VALUES, OSError, ImportError, SafetensorError)


def load_module(
    folder: Path,
    described: inspection.Description,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Any:
    """transformers' module with the checkpoint's numbers; raises ConfigError with the remedy.

    dtype: None = as transformers finds it."""
    arguments: dict[str, Any] = {
        "dtype": dtype or "auto",
        "attn_implementation": seam.IMPLEMENTATION,
        "trust_remote_code": False,
        "config": described.config,
        "key_mapping": described.names,
    }
    if config.quantization is not None:
        arguments["quantization_config"] = inspection.quantization_of(config)
    if config.tensor_parallel > 1:
        from cluster.engine.parallel import distributed_config

        arguments["distributed_config"] = distributed_config(config.tensor_parallel)
    else:
        arguments["device_map"] = config.device_map or {"": device}
    try:
        state = load_int8(folder)
        if state is None:
            loader, wanted = AutoModelForCausalLM, folder
        else:
            arguments["state_dict"] = state
            # The automatic classes want a folder with weights of a kind that they know.
            loader, wanted = getattr(transformers, described.config.architectures[0]), None
        module, report = loader.from_pretrained(wanted, output_loading_info=True, **arguments)
    except _LOADING_ERRORS as error:
        raise ConfigError(
            f"model {config.model!r} cannot be loaded: {error}", param="model"
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:
        # transformers would go on with random numbers in their place.
        raise ConfigError(
            f"model {config.model!r} lacks {len(absent)} of its weights, {absent[0]} among them; "
            "the checkpoint is incomplete or of another architecture",
            param="model",
        )
    return module
