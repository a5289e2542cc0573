"""Some layers of a model by transformers alone: what parts of a loaded model are compared with."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cluster.core import TokenArray


@lru_cache(maxsize=4)
def _part(folder: Path, layers: tuple[int, ...]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    config, decoder = model.config, model.model
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    config.num_hidden_layers = len(layers)
    decoder.layers = torch.nn.ModuleList(decoder.layers[index] for index in layers)
    return model


def plain(folder: Path, layers: Sequence[int], text: TokenArray) -> torch.Tensor:
    """The last row's logits of transformers' own model, whose other layers were deleted."""
    with torch.no_grad():
        ids = torch.as_tensor(text, dtype=torch.int64)[None]
        return _part(folder, tuple(layers))(input_ids=ids, use_cache=False).logits[0, -1]
