"""Tiny GGUF files, written as llama.cpp's converter writes those of a Llama or a Qwen2-MoE."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, TokenType
from safetensors.torch import load_file

from cluster.models.gguf import convert
from tests.support.checkpoints import SPECIAL_TOKENS

# The places of the numbers in a block by which all its weights are multiplied.
_K_SCALES = {
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
}


def write_gguf(
    checkpoint: Path,
    file: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    fields: Mapping[str, int] | None = None,
    tokenizer: bool = True,
    add_bos: bool = False,
    left_out: str = "",
) -> Path:
    """The Llama or Qwen2-MoE checkpoint of `tiny_checkpoint` as `file`.

    kind: of the matrices.  fields: further unsigned integers of the header.  left_out: a tensor's
    name in the checkpoint.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = config["model_type"].replace("_", "")
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, config)
    for key, value in (fields or {}).items():
        writer.add_uint32(key, value)
    if tokenizer:
        _write_tokenizer(writer, checkpoint, config, pre)
        writer.add_add_bos_token(add_bos)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, tensor in _with_joined_experts(load_file(checkpoint / "model.safetensors")).items():
        if name == left_out:
            continue
        values = _in_file_order(name, tensor.to(torch.float32).numpy().squeeze(), config)
        is_wide = values.ndim == 1 or name.endswith("mlp.gate.weight")
        stored = GGMLQuantizationType.F32 if is_wide else kind
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            blocks(values, stored),
            raw_dtype=stored,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def converted(checkpoint: Path, folder: Path, **options: Any) -> Path:
    """What a GGUF file of the checkpoint, written beside `folder`, is converted into there."""
    convert(write_gguf(checkpoint, folder.with_suffix(".gguf"), **options), folder)
    return folder


def blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """`values` in the file's form; of K-quants, which the library does not make, random blocks of
    weights of about that size."""
    if kind not in _K_SCALES:
        return gguf.quantize(values, kind)
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (len(values), values.shape[1] // num_weights, num_bytes)
    made = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for start in _K_SCALES[kind]:
        scale = np.float16(np.abs(values).max() / 1000)
        made[..., start : start + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return made.reshape(len(values), -1)


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _with_joined_experts(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The file has one tensor of all experts of a layer, in their order."""
    joined: dict[str, list[torch.Tensor]] = {}
    for name in sorted(state):
        joined.setdefault(re.sub(r"\.experts\.\d+", ".experts", name), []).append(state[name])
    return {name: torch.stack(each).squeeze(0) for name, each in joined.items()}


def _write_tokenizer(
    writer: gguf.GGUFWriter, checkpoint: Path, config: Mapping[str, Any], pre: str
) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    kinds = [TokenType.CONTROL if t in SPECIAL_TOKENS else TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _in_file_order(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """GGUF keeps each head's rotated halves interleaved."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if heads is None or config["model_type"] != "llama":
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
