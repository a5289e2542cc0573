"""Block drafters for tiny targets, in the published forms: random ones, and one that is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.support.draft.heads import HIDDEN, SURENESS, VOCAB_SIZE

DIM = 16


def random_block(
    folder: Path, target: Path, *, spark: bool, fill: float | None = None, **keys: Any
) -> Path:
    """A drafter of random weights for a target's sizes, of two layers and blocks of four rows.

    spark: of DSpark's form, with its heads and a vocabulary of every third token.  fill: what the
    first layer's output holds in place of random numbers.  keys: of its configuration."""
    config = AutoConfig.from_pretrained(target)
    size, vocab_size = config.hidden_size, config.vocab_size
    reduced = vocab_size // 3 if spark else vocab_size
    tensors = _tensors(size, 3 * size, reduced, vocab_size if spark else 0, rank=8)
    if spark:
        tensors["d2t"] = 2 * torch.arange(reduced)
    if fill is not None:
        tensors["layers.0.self_attn.o_proj.weight"].fill_(fill)
    said = _config(size, vocab_size, 2, spark=spark, rank=8) | {"draft_vocab_size": reduced}
    return _written(folder, said | keys, tensors)


def right_block(folder: Path) -> Path:
    """The drafter that knows how `cyclic_target` goes on: by its Markov head alone."""
    tensors = _tensors(HIDDEN, HIDDEN, VOCAB_SIZE, VOCAB_SIZE, rank=VOCAB_SIZE)
    tensors["norm.weight"].zero_()
    tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB_SIZE)
    after = torch.roll(torch.eye(VOCAB_SIZE), 1, dims=0)
    tensors["markov_head.markov_w2.weight"] = SURENESS * after
    # The confidence head is sure of nothing but its bias.
    tensors["confidence_head.proj.weight"].zero_()
    tensors["confidence_head.proj.bias"].fill_(3.0)
    said = _config(HIDDEN, VOCAB_SIZE, 2, spark=True, rank=VOCAB_SIZE)
    return _written(folder, said | {"block_size": 6, "target_layer_ids": [0]}, tensors)


def _tensors(
    size: int, taps: int, draft_vocab: int, markov_vocab: int, *, rank: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"fc.weight": drawn(size, taps)}
    tensors |= {f"{name}.weight": torch.ones(size) for name in ("hidden_norm", "norm")}
    for layer in range(2):
        shapes = {
            "self_attn.q_proj": (4 * DIM, size), "self_attn.k_proj": (2 * DIM, size),
            "self_attn.v_proj": (2 * DIM, size), "self_attn.o_proj": (size, 4 * DIM),
            "mlp.gate_proj": (size, size), "mlp.up_proj": (size, size),
            "mlp.down_proj": (size, size),
        }  # fmt: skip
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = drawn(*shape)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"layers.{layer}.{name}.weight"] = torch.ones(DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"layers.{layer}.{name}.weight"] = torch.ones(size)
    if markov_vocab:
        tensors["lm_head.weight"] = 4 * drawn(draft_vocab, size)
        tensors["markov_head.markov_w1.weight"] = drawn(markov_vocab, rank)
        tensors["markov_head.markov_w2.weight"] = 4 * drawn(draft_vocab, rank)
        tensors["confidence_head.proj.weight"] = drawn(1, size + rank)
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    return tensors


def _config(
    size: int, vocab_size: int, mask_token_id: int, *, spark: bool, rank: int
) -> dict[str, Any]:
    own = {
        "model_type": "qwen3", "hidden_size": size, "intermediate_size": size, "head_dim": DIM,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": vocab_size, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "block_size": 4,
    }  # fmt: skip
    where = {"mask_token_id": mask_token_id, "target_layer_ids": [0, 1, 2]}
    if not spark:
        return own | {"architectures": ["DFlashDraftModel"], "dflash_config": where}
    return own | where | {
        "architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip


def _written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder
