"""Block drafters for tiny targets, in the published forms: random ones, and one that is right."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.support.draft.block_forms import tensors
from tests.support.draft.heads import HIDDEN, SURENESS, VOCAB_SIZE, written

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
    said = _config(size, vocab_size, 2, spark=spark, rank=8) | keys
    if spark:
        said["draft_vocab_size"] = reduced
    held = tensors(said)
    if spark:
        held["d2t"] = 2 * torch.arange(reduced)
    if fill is not None:
        held["layers.0.self_attn.o_proj.weight"].fill_(fill)
    return written(folder, said, held)


def right_block(folder: Path) -> Path:
    """The drafter that knows how `cyclic_target` goes on: by its Markov head alone."""
    said = _config(HIDDEN, VOCAB_SIZE, 2, spark=True, rank=VOCAB_SIZE)
    said |= {"block_size": 6, "target_layer_ids": [0]}
    held = tensors(said)
    held["norm.weight"].zero_()
    held["markov_head.markov_w1.weight"] = torch.eye(VOCAB_SIZE)
    after = torch.roll(torch.eye(VOCAB_SIZE), 1, dims=0)
    held["markov_head.markov_w2.weight"] = SURENESS * after
    # The confidence head is sure of nothing but its bias.
    held["confidence_head.proj.weight"].zero_()
    held["confidence_head.proj.bias"].fill_(3.0)
    return written(folder, said, held)


def _config(
    size: int, vocab_size: int, mask_token_id: int, *, spark: bool, rank: int
) -> dict[str, Any]:
    own = {
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": size,
        "head_dim": DIM,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "block_size": 4,
    }
    where = {"mask_token_id": mask_token_id, "target_layer_ids": [0, 1, 2]}
    if not spark:
        return own | {"architectures": ["DFlashDraftModel"], "dflash_config": where}
    return (
        own
        | where
        | {
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    )
