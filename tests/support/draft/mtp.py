"""Tiny checkpoints with a multi-token-prediction layer of random weights, in each public layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import DEFAULT_VOCAB_SIZE, tiny_checkpoint
from tests.support.draft.heads import HIDDEN, cyclic_target

SIZE, HEADS, KV_HEADS, DIM, EXPERTS, INNER = 48, 4, 2, 16, 4, 16
LAYERS = 3
# By the name that `tiny_checkpoint` knows: its fields beyond those.
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4-moe": {},
    "deepseek-v3": {"q_lora_rank": 16, "kv_lora_rank": 12, "v_head_dim": 10},
    "qwen3-next": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": INNER,
        "mlp_only_layers": [0, 1, 2],
    },
}


def with_mtp(family: str, folder: Path, **change: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Write the checkpoint; returns the layer's tensors by the names behind their prefix.

    change: tensors to put in place of those or, where None, to leave out; __ stands for a dot."""
    tiny_checkpoint(family, folder, **FAMILIES[family])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    key = "mtp_num_hidden_layers" if family == "qwen3-next" else "num_nextn_predict_layers"
    (folder / "config.json").write_text(json.dumps(config | {key: 1}))
    held = _tensors(family)
    for name, tensor in change.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    prefix = "mtp." if family == "qwen3-next" else f"model.layers.{LAYERS}."
    own = load_file(folder / "model.safetensors")
    own |= {prefix + name: tensor for name, tensor in held.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return held


def _tensors(family: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    is_qwen = family == "qwen3-next"
    one = 0 if is_qwen else 1  # Qwen's norms hold what they differ from 1 by
    block = "layers.0." if is_qwen else ""
    attention = f"{block}self_attn."
    matrices = {f"{attention}o_proj": (SIZE, HEADS * DIM)}
    norms = {f"{block}{name}_layernorm": SIZE for name in ("input", "post_attention")}
    if family == "deepseek-v3":
        matrices = {
            f"{attention}q_a_proj": (16, SIZE),
            f"{attention}q_b_proj": (HEADS * 16, 16),
            f"{attention}kv_a_proj_with_mqa": (12 + 8, SIZE),
            f"{attention}kv_b_proj": (HEADS * (8 + 10), 12),
            f"{attention}o_proj": (SIZE, 40),
        }
        norms |= {f"{attention}q_a_layernorm": 16, f"{attention}kv_a_layernorm": 12}
    else:
        matrices[f"{attention}q_proj"] = (HEADS * DIM * (2 if is_qwen else 1), SIZE)
        matrices |= {f"{attention}{name}_proj": (KV_HEADS * DIM, SIZE) for name in "kv"}
        norms |= {f"{attention}q_norm": DIM, f"{attention}k_norm": DIM}
    shared = "shared_expert" if is_qwen else "shared_experts"
    for part in (f"{block}mlp.{shared}", *(f"{block}mlp.experts.{i}" for i in range(EXPERTS))):
        matrices |= {f"{part}.{name}_proj": (INNER, SIZE) for name in ("gate", "up")}
        matrices[f"{part}.down_proj"] = (SIZE, INNER)
    matrices[f"{block}mlp.gate"] = (EXPERTS, SIZE)
    if is_qwen:
        matrices |= {f"{block}mlp.shared_expert_gate": (1, SIZE), "fc": (SIZE, 2 * SIZE)}
        norms |= dict.fromkeys(("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"), SIZE)
    else:
        matrices |= {
            "eh_proj": (SIZE, 2 * SIZE),
            "shared_head.head": (DEFAULT_VOCAB_SIZE, SIZE),
            "embed_tokens": (DEFAULT_VOCAB_SIZE, SIZE),
        }
        norms |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), SIZE)
    held = {f"{name}.weight": 2 * drawn(*shape) for name, shape in matrices.items()}
    held |= {f"{name}.weight": one + drawn(size) for name, size in norms.items()}
    if not is_qwen:
        held["mlp.gate.e_score_correction_bias"] = drawn(EXPERTS)
    if family == "glm4-moe":
        biases = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        held |= {f"self_attn.{name}_proj.bias": drawn(size) for name, size in biases.items()}
    return held


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
