"""Llamas of random weights, made on the device; and an EAGLE-3 head for them, in a folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cluster.config.schema import EngineConfig
from cluster.engine.attention import seam
from cluster.engine.loading.model import LoadedModel, fused_on_gpu
from cluster.engine.loading.probe import probe_layers
from cluster.records import frozen

_WEIGHT_STD = 0.02
# Of a trained model's logits: its draws at temperature 0.6 are among a handful of tokens, and so
# are the best children of a head's row.
_LOGIT_STD = 6.5


@frozen
class Sizes:
    """A Llama's.  draft_vocab_size: its head's outputs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    draft_vocab_size: int
    max_context_len: int

    def fields(self) -> dict[str, Any]:
        """Of transformers' configuration."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_context_len,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }


# Llama 3.1's, and its published EAGLE-3 head's.
LLAMA_8B = Sizes(4096, 32, 32, 8, 128, 14336, 128_256, 32_000, 131_072)
TINY = Sizes(64, 4, 4, 2, 16, 128, 500, 100, 2048)


def load_random(sizes: Sizes, config: EngineConfig, device: torch.device) -> LoadedModel:
    """What `load_model` would make of a checkpoint in `config.model`, a folder with its
    config.json alone."""
    seam.register()
    dtype = getattr(torch, config.dtype)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(
            LlamaConfig(**sizes.fields()), dtype=dtype, attn_implementation=seam.IMPLEMENTATION
        )
    fill(module, seed=0)
    module.eval()
    module.requires_grad_(False)
    with torch.inference_mode():
        layers = probe_layers(module, device)
    limit = sizes.max_context_len
    return LoadedModel(
        module=module,
        source=config.model,
        architecture=type(module).__name__,
        layers=layers,
        device=device,
        vocab_size=sizes.vocab_size,
        max_context_len=limit,
        eos_token_ids=(),
        fused=fused_on_gpu(module, config, layers, limit),
    )


@torch.no_grad()
def fill(module: Any, seed: int) -> None:
    """Draw a Llama's weights anew, in place."""
    output = module.get_output_embeddings().weight
    generator = torch.Generator(output.device).manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            std = _LOGIT_STD / math.sqrt(output.shape[1]) if parameter is output else _WEIGHT_STD
            parameter.normal_(0.0, std, generator=generator)


def read_bytes(model: LoadedModel, num_tokens: int) -> int:
    """Bytes that a plain step reads at least: all weights but the embedding's, and the keys and
    values of so many tokens."""
    weights = sum(parameter.nbytes for parameter in model.module.parameters())
    sizes = [each.num_kv_heads * each.head_dim * each.dtype.itemsize for each in model.layers]
    embedding: int = model.module.get_input_embeddings().weight.nbytes
    return weights - embedding + num_tokens * 2 * sum(sizes)


def write_target(folder: Path, sizes: Sizes) -> None:
    """The folder of a target that `load_random` makes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], **sizes.fields()}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def write_head(folder: Path, sizes: Sizes, device: torch.device) -> None:
    """An EAGLE-3 head of random weights, as the authors publish theirs."""
    hidden, dim, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    layer = "midlayer."
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (sizes.draft_vocab_size, hidden),
        f"{layer}self_attn.q_proj": (dim, 2 * hidden),
        f"{layer}self_attn.k_proj": (kv, 2 * hidden),
        f"{layer}self_attn.v_proj": (kv, 2 * hidden),
        f"{layer}self_attn.o_proj": (hidden, dim),
        f"{layer}mlp.gate_proj": (sizes.intermediate, hidden),
        f"{layer}mlp.up_proj": (sizes.intermediate, hidden),
        f"{layer}mlp.down_proj": (hidden, sizes.intermediate),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    generator = torch.Generator(device).manual_seed(1)
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16, device=device)
        .normal_(
            0.0,
            _LOGIT_STD / math.sqrt(hidden) if name == "lm_head" else _WEIGHT_STD,
            generator=generator,
        )
        .cpu()
        for name, shape in shapes.items()
    }
    for name in ("norm", *(f"{layer}{each}" for each in norms)):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(sizes.draft_vocab_size, dtype=torch.int64)  # the first of them
    config = {
        **sizes.fields(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": sizes.draft_vocab_size,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
