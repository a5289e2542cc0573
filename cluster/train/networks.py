"""The shapes of the demonstration networks, and their Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.train.chat_drafter import save_network
from cluster.train.processes import processes
from cluster.train.tokenizer import END, END_OF_TEXT, VOCAB_SIZE, save_tokenizer


@frozen
class Shape:
    """Sizes of a Llama with tied embeddings and heads of 64."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    max_context_len: int = 4096


# Head counts are even so that the target can be split over two tensor-parallel ranks.
TARGET = Shape(384, num_layers=6, num_heads=6, num_kv_heads=2, intermediate_size=896)
DRAFTER = Shape(192, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=512)


def build(shape: Shape, *, end_of_text_id: int, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A newly initialised network; the caller seeds torch."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=shape.max_context_len,
        tie_word_embeddings=True,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
        initializer_range=0.02,
        attn_implementation="sdpa",
    )
    network = LlamaForCausalLM(config)
    with torch.no_grad():
        # Every block starts as the identity, so depth does not slow the start of training.
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return network


def load(folder: Path) -> LlamaForCausalLM:
    """The network of a folder in float32, whatever its saved dtype, on this process's device."""
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: no model here; train it first with `drafthouse train demo`")
    network = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(network, LlamaForCausalLM)
    network.to(processes().device)
    return network


def save(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face folder with bfloat16 weights."""
    stop_ids = [tokenizer.convert_tokens_to_ids(token) for token in (END_OF_TEXT, END)]
    network.generation_config = GenerationConfig(
        bos_token_id=stop_ids[0], eos_token_id=stop_ids, pad_token_id=stop_ids[0]
    )
    save_network(network, folder, "bfloat16")
    save_tokenizer(tokenizer, folder)
