"""Block drafters of random weights in every published form, read from their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cluster.draft.heads.checkpoint import HeadTarget
from cluster.draft.heads.load import load_draft_head
from tests.support.draft.heads import written

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 32, 4, 2, 16, 48, 2
VOCAB, DRAFT_VOCAB, TARGET_LAYERS, BLOCK, MASK, RANK = 50, 20, 9, 4, 49, 6
THETA = 5000.0
OWN = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": THETA,
    "model_type": "qwen3",
    "max_position_embeddings": 64,
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "num_target_layers": TARGET_LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 6]},
    **OWN,
}
SPARK_HEADS = {"markov_rank": RANK, "enable_confidence_head": True}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "target_layer_ids": [1, 4, 6],
    "markov_head_type": "vanilla",
    "confidence_head_with_markov": True,
    **SPARK_HEADS,
    **OWN,
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "speculators_version": "0.9",
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [2, 5, 7],
    "draft_vocab_size": DRAFT_VOCAB,
    "transformer_layer_config": OWN,
}
# Of DFlash-2, whose published folders say these in dflash_config.
SECOND = {
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": RANK,
    "selector_top_k": 5,
}
DFLASH_2 = {
    **DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        **DFLASH["dflash_config"],
        **SECOND,
        "input_embedding_scale": 0.5,
        "final_logit_softcapping": 3.0,
        "output_multiplier": 0.7,
    },
}
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
OUTPUT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
_SHARED = {"embedding": EMBEDDING, "output": OUTPUT}
TARGET = HeadTarget(HIDDEN, VOCAB, TARGET_LAYERS, _SHARED.__getitem__)
CONTEXT = 7
TAPS = torch.randn(CONTEXT, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
TOKENS = [3, 17, 8, 11, 30]  # the last known one, then what is drafted
VARIANTS = {
    "dflash": DFLASH,
    "dflash with biases": {**DFLASH, "attention_bias": True},
    "dflash of speculators": SPECULATORS,
    "dflash-2": DFLASH_2,
    "dflash-2 of speculators": {
        **SPECULATORS,
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "sliding_window_non_causal": True,
        **SECOND,
        "conv_kernel_size": 3,
    },
    "dspark": DSPARK,
    "dspark gated": {**DSPARK, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "dspark rnn": {**DSPARK, "markov_head_type": "rnn", "enable_confidence_head": False},
    "dspark without a markov head": {
        **DSPARK,
        "markov_rank": 0,
        "confidence_head_with_markov": False,
    },
    "dspark of speculators": {
        **SPECULATORS,
        "speculators_model_type": "dspark",
        "sample_from_anchor": True,
        **SPARK_HEADS,
        "confidence_head_with_markov": True,
    },
}


def tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random ones, as the configuration wants them."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    own = config.get("transformer_layer_config", config)
    sizes = ("hidden_size", "intermediate_size", "head_dim", "vocab_size")
    hidden, inner, dim, vocab = (own[key] for key in sizes)
    heads, kv_heads = own["num_attention_heads"] * dim, own["num_key_value_heads"] * dim
    where = {**config, **config.get("dflash_config", {})}
    taps = where.get("target_layer_ids") or where.get("aux_hidden_state_layer_ids") or range(3)
    held = {
        "fc.weight": drawn(hidden, len(taps) * hidden),
        "hidden_norm.weight": 1 + drawn(hidden),
        "norm.weight": 1 + drawn(hidden),
    }
    taps, rank = where.get("conv_kernel_size"), where.get("selector_rank")
    if rank:
        for name in ("predecessor", "successor"):
            held[f"candidate_selector.{name}_codebook"] = drawn(vocab, rank) * 4
        held["candidate_selector.hidden_projection.weight"] = drawn(rank, hidden)
    for layer in range(own["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        for part in ("attention_conv", "mlp_conv") if taps else ():
            held[f"{prefix}{part}.base_kernel"] = drawn(2, taps, hidden) + 1
            size = 2 * taps * hidden // where["conv_group_size"]
            held[f"{prefix}{part}.kernel_projection.weight"] = drawn(size, hidden)
        shapes = {
            "q": (heads, hidden),
            "k": (kv_heads, hidden),
            "v": (kv_heads, hidden),
            "o": (hidden, heads),
        }
        for name, shape in shapes.items():
            held[f"{prefix}self_attn.{name}_proj.weight"] = drawn(*shape)
            if config.get("attention_bias"):
                held[f"{prefix}self_attn.{name}_proj.bias"] = drawn(shape[0])
        for name in ("q_norm", "k_norm"):
            held[f"{prefix}self_attn.{name}.weight"] = 1 + drawn(dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            held[f"{prefix}{name}.weight"] = 1 + drawn(hidden)
        for name in ("gate", "up"):
            held[f"{prefix}mlp.{name}_proj.weight"] = drawn(inner, hidden)
        held[f"{prefix}mlp.down_proj.weight"] = drawn(hidden, inner)
    size, rank = config.get("draft_vocab_size", vocab), config.get("markov_rank")
    if size != vocab:
        held["lm_head.weight"] = drawn(size, hidden)
        held["d2t"] = torch.arange(size)  # target id = 2 i
        held["t2d"] = torch.zeros(vocab, dtype=torch.bool)
    if rank:
        held["markov_head.markov_w1.weight"] = drawn(vocab, rank) * 4
        held["markov_head.markov_w2.weight"] = drawn(size, rank) * 4
        kind = config.get("markov_head_type", "vanilla")
        if kind == "gated":
            held["markov_head.gate_proj.weight"] = drawn(rank, hidden + rank)
            held["markov_head.gate_proj.bias"] = drawn(rank)
        if kind == "rnn":
            held["markov_head.joint_proj.weight"] = drawn(3 * rank, 2 * rank + hidden)
            held["markov_head.joint_proj.bias"] = drawn(3 * rank)
    if config.get("enable_confidence_head"):
        wide = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        held["confidence_head.proj.weight"] = drawn(1, wide)
        held["confidence_head.proj.bias"] = drawn(1)
    return held


def loaded(
    folder: Path,
    config: Mapping[str, Any],
    change: Mapping[str, torch.Tensor | None] | None = None,
) -> Any:
    """A head with the tensors of `config`.  change: others in their place, None = left out."""
    held = {**tensors(config), **(change or {})}
    return load_draft_head(written(folder, config, held), TARGET)
