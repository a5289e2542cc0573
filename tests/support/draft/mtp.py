"""Tiny checkpoints with a multi-token-prediction layer of random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import DEFAULT_VOCAB_SIZE, SERVED
from tests.support.checkpoints import tiny_checkpoint
from tests.support.draft.heads import HIDDEN, cyclic_target

SIZE, HEADS, DIM, EXPERTS = 48, 4, 16, 4
LAYERS = 3
# The names of Qwen3-Next and 3.5 for what is not the decoder layer.
APART = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}


def with_mtp(
    folder: Path, architecture: str = "glm4-moe", **change: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Write the checkpoint; returns the layer's tensors by GLM's names behind their prefix.

    change: tensors to put in place of those or, where None, to leave out; __ or . is a dot."""
    tiny_checkpoint(architecture, folder, rms_norm_eps=1e-5)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    own_vocabulary = 0 if is_apart(folder) else DEFAULT_VOCAB_SIZE
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    given = {
        name: drawn(*shape) * 2 if len(shape) > 1 else drawn(*shape) + name.endswith("weight")
        for name, shape in _shapes(folder, own_vocabulary).items()
    }
    given |= {name.replace("__", "."): tensor for name, tensor in change.items()}
    return _added(folder, {name: tensor for name, tensor in given.items() if tensor is not None})


def right_mtp(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    """`cyclic_target` with a layer that knows how it goes on: its output is the embedding's row."""
    cyclic_target(folder, model_type, **settings)
    shapes = _shapes(folder)
    scale = 0.0 if is_apart(folder) else 1.0  # there a norm's is 1 + weight
    held = {
        name: torch.full(shape, scale if len(shape) == 1 else 0.0) for name, shape in shapes.items()
    }
    _added(folder, held | {"eh_proj.weight": torch.eye(*shapes["eh_proj.weight"])})
    return folder


def right_latent_mtp(folder: Path) -> Path:
    """The same of a target with latent attention."""
    model_type, settings = SERVED["deepseek-v3"]
    own = {"hidden_size": HIDDEN, "first_k_dense_replace": LAYERS}
    return right_mtp(folder, model_type, **{**settings, **own})


def right_mtp_apart(folder: Path) -> Path:
    """The same of a target that stores the layer apart."""
    model_type, settings = SERVED["qwen3.5"]
    own = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    kinds = settings["layer_types"][:LAYERS]
    return right_mtp(folder, model_type, **{**settings, **own, "layer_types": kinds})


def is_apart(folder: Path) -> bool:
    """True of Qwen3-Next's and 3.5's checkpoints."""
    return "linear_attention" in (folder / "config.json").read_text("utf-8")


def _shapes(folder: Path, own_vocabulary: int = 0) -> dict[str, tuple[int, ...]]:
    """Of the layer's tensors: what the last layer of the model has, and what joins its inputs.

    own_vocabulary: the size of an embedding and an output layer of its own, 0 = it has none."""
    prefix, stored = f"model.layers.{LAYERS - 1}.", load_file(folder / "model.safetensors")
    found = {
        name.removeprefix(prefix): tuple(each.shape)
        for name, each in stored.items()
        if name.startswith(prefix)
    }
    (size,) = found["input_layernorm.weight"]
    found |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (size,))
    found["eh_proj.weight"] = size, 2 * size
    if own_vocabulary:
        for name in ("shared_head.head.weight", "embed_tokens.weight"):
            found[name] = own_vocabulary, size
    return found


def _added(folder: Path, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own, prefix = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    names = {name: prefix + name for name in held}
    if is_apart(folder):
        names = {name: f"mtp.{APART.get(name, f'layers.0.{name}')}" for name in held}
    own |= {names[name]: tensor for name, tensor in held.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return held
