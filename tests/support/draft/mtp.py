"""Tiny checkpoints with a multi-token-prediction layer of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import DEFAULT_VOCAB_SIZE
from tests.support.checkpoints import tiny_checkpoint
from tests.support.draft.heads import HIDDEN, cyclic_target

SIZE, HEADS, KV_HEADS, DIM, EXPERTS, INNER = 48, 4, 2, 16, 4, 16
LAYERS = 3


def with_mtp(folder: Path, **change: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Write the checkpoint; returns the layer's tensors by the names behind their prefix.

    change: tensors to put in place of those or, where None, to leave out; __ stands for a dot."""
    tiny_checkpoint("glm4-moe", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    changed = {name.replace("__", "."): tensor for name, tensor in change.items()}
    given = {**_tensors(), **changed}
    held = {name: tensor for name, tensor in given.items() if tensor is not None}
    own = load_file(folder / "model.safetensors")
    own |= {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in held.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return held


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    heads = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    matrices = {
        "self_attn.o_proj": (SIZE, HEADS * DIM),
        "mlp.gate": (EXPERTS, SIZE),
        "eh_proj": (SIZE, 2 * SIZE),
        "shared_head.head": (DEFAULT_VOCAB_SIZE, SIZE),
        "embed_tokens": (DEFAULT_VOCAB_SIZE, SIZE),
        **{f"self_attn.{name}_proj": (size, SIZE) for name, size in heads.items()},
    }
    for part in ("mlp.shared_experts", *(f"mlp.experts.{i}" for i in range(EXPERTS))):
        matrices |= {f"{part}.{name}_proj": (INNER, SIZE) for name in ("gate", "up")}
        matrices[f"{part}.down_proj"] = (SIZE, INNER)
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    sizes = dict.fromkeys(norms, SIZE) | {"self_attn.q_norm": DIM, "self_attn.k_norm": DIM}
    held = {f"{name}.weight": 2 * drawn(*shape) for name, shape in matrices.items()}
    held |= {f"{name}.weight": 1 + drawn(size) for name, size in sizes.items()}
    held |= {f"self_attn.{name}_proj.bias": drawn(size) for name, size in heads.items()}
    return held | {"mlp.gate.e_score_correction_bias": drawn(EXPERTS)}


def right_mtp(folder: Path) -> Path:
    """`cyclic_target` with a layer that knows how it goes on: its output is the embedding's row."""
    cyclic_target(folder)
    inner = {
        "gate_proj": (HIDDEN, HIDDEN),
        "up_proj": (HIDDEN, HIDDEN),
        "down_proj": (HIDDEN, HIDDEN),
    }
    heads = {name: (HIDDEN // (2 if name in "kv" else 1), HIDDEN) for name in "qkvo"}
    held = {f"mlp.{name}.weight": torch.zeros(shape) for name, shape in inner.items()}
    held |= {f"self_attn.{name}_proj.weight": torch.zeros(shape) for name, shape in heads.items()}
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    held |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    held["eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
    own = load_file(folder / "model.safetensors")
    own |= {f"model.layers.3.{name}": tensor for name, tensor in held.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return folder
