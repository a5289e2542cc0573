"""GGUF files: read, and converted into an ordinary Hugging Face folder, so that all else knows one
kind.

transformers unpacks the weights and rebuilds config and tokenizer; what it leaves is added here.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
)

from cluster.errors import ConfigError
from cluster.models.experts import unstacked
from cluster.models.grouped import GroupedWeight, save_groups

# Opens a GGUF file and reads its header; what is cut or incomplete is refused.


def open_gguf(file: Path) -> GGUFReader:
    """The file, whose tensors are not read yet; raises ConfigError, with the remedy, where it
    cannot be a model of ours."""
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise ConfigError(
            f"{file} is cut or is no GGUF file ({error}); copy or download it again", param="model"
        ) from error
    if int(field(reader, "split.count") or 1) > 1:
        raise ConfigError(
            f"{file} is one part of a split model; join the parts with `llama-gguf-split --merge`",
            param="model",
        )
    if field(reader, "tokenizer.ggml.model") is None:
        raise ConfigError(
            f"{file} holds no tokenizer; use the model's safetensors folder", param="model"
        )
    return reader


def field(reader: GGUFReader, key: str) -> Any:
    """A value of the header, None where there is none of that name."""
    found = reader.fields.get(key)
    return None if found is None else found.contents()


# The blocks of a GGUF file as weights of a model's linear layers, in the model's order of rows.
#
# A layer's weight is found by the name that llama.cpp gives it, and its rows by their numbers:
# the widened weight must be the file's rows, each unchanged, in some order (those of queries and
# keys are stored in another one). What is not, or has another kind of block, is left out.


log = logging.getLogger(__name__)

_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q4_K: 4,
    GGMLQuantizationType.Q5_K: 8,
    GGMLQuantizationType.Q8_0: 8,
    GGMLQuantizationType.Q6_K: 8,
}
# Of a matrix that was rounded to bfloat16; scales rounded to float16 change it by less.
_TOLERANCE = 2.0**-8


def blocks_of(reader: GGUFReader, model: torch.nn.Module) -> dict[str, GroupedWeight]:
    """The blocks by the names of the linear layers of `model`, which was widened from the file,
    its experts `unstacked`."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = field(reader, "general.architecture")
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    if not kinds:
        return {}
    config: Any = model.config
    names = gguf.get_tensor_name_map(kinds[0], int(config.get_text_config().num_hidden_layers))
    found: dict[str, GroupedWeight] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        # The file has one tensor of all experts of a layer.
        expert = re.search(r"\.experts\.(\d+)", name)
        general = name.replace(expert[0], ".experts") if expert else name
        stored = tensors.get(f"{names.get_name(general)}.weight")
        if stored is None and layer is model.get_output_embeddings():  # type: ignore[operator]
            stored = tensors.get("token_embd.weight")  # the two are tied
        if stored is None:
            continue
        data = stored.data[int(expert[1])] if expert else stored.data
        blocks = _as_in(stored, data, layer.weight.detach())
        if blocks is not None:
            found[name] = blocks
    return found


def grouped(kind: GGMLQuantizationType, data: np.ndarray, weights: np.ndarray) -> GroupedWeight:
    """Blocks as the file has them, uint8 [out, bytes], which stand for `weights`, float32 [out,
    in].  Scales of K-quants, products of two numbers, are rounded to float16."""
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    scale, minimum = _scales(kind, np.ascontiguousarray(data).reshape(-1, num_bytes))
    group, num_outputs = num_weights // scale.shape[1], len(data)
    weights = weights.reshape(num_outputs, -1, group)
    scale = scale.reshape(num_outputs, -1, 1)
    if minimum is not None:
        minimum = minimum.reshape(num_outputs, -1, 1)
        weights = weights - minimum
    # Far from a half, for they were made of whole numbers.
    q = np.divide(weights, scale, out=np.zeros_like(weights), where=scale != 0).round()
    bits = _BITS[kind]
    return GroupedWeight(
        bits=bits,
        group=group,
        q=torch.from_numpy(q.astype(np.uint8 if bits == 4 else np.int8).reshape(num_outputs, -1)),
        scale=torch.from_numpy(scale[..., 0].astype(np.float16)),
        minimum=None if minimum is None else torch.from_numpy(minimum[..., 0].astype(np.float16)),
    )


def _scales(kind: GGMLQuantizationType, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale and minimum of each group, float32 [blocks, groups], of uint8 [blocks, bytes]."""

    def half(start: int) -> np.ndarray:
        return (
            np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)
        )

    match kind:
        case GGMLQuantizationType.Q4_0:
            return half(0), -8.0 * half(0)
        case GGMLQuantizationType.Q4_1:
            return half(0), half(2)
        case GGMLQuantizationType.Q4_K | GGMLQuantizationType.Q5_K:
            scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
            return half(0) * scales, -half(2) * minima
        case GGMLQuantizationType.Q6_K:
            return half(208) * blocks[:, 192:208].view(np.int8), None
    return half(0), None  # Q8_0


def _as_in(stored: ReaderTensor, data: np.ndarray, widened: torch.Tensor) -> GroupedWeight | None:
    """The blocks in the order of the rows of `widened`; None where they are not its weights.

    data: the part of the tensor that is to be those."""
    kind = stored.tensor_type
    if kind not in _BITS:
        return None
    rows = gguf.dequantize(data, kind)
    order = _order(torch.from_numpy(rows).to(widened.dtype), widened)
    if order is None:
        log.info("blocks left out tensor=%s: the model's weight is another one", stored.name)
        return None
    blocks = grouped(kind, data[order], rows[order])
    error = (blocks.dequantized() - widened.float()).norm()
    if not error <= _TOLERANCE * widened.float().norm():
        log.info("blocks left out tensor=%s: their scales are no numbers of 16 bits", stored.name)
        return None
    return blocks


def _order(rows: torch.Tensor, wanted: torch.Tensor) -> np.ndarray | None:
    """The places in `rows` of those of `wanted`, which are the same in another order; else None."""
    if rows.shape != wanted.shape:
        return None
    if torch.equal(rows, wanted):
        return np.arange(len(rows))
    theirs, ours = (each.contiguous().view(torch.uint8).numpy() for each in (rows, wanted))
    places = {row.tobytes(): place for place, row in enumerate(theirs)}
    order = np.array([places.get(row.tobytes(), -1) for row in ours])
    return None if (order < 0).any() else order


# llama.cpp splits these vocabularies' text as GPT-2 does, but every digit from its neighbours
# (`llm_tokenizer_bpe` in src/llama-vocab.cpp); transformers leaves out the digits.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# The last two end a turn, where the first may only end a document.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Of a configuration, and what states them in the header, which transformers does not ask.
_EXPERT_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_CONVERSION_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    ImportError,
)


def convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer, chat template and generation config of `file` into `folder`.

    16-bit weights stay as they are and quantised ones become bfloat16, so it needs memory and disk
    for two bytes a parameter.  Linear layers' blocks are kept beside them (`grouped_file`).  Raises
    ConfigError where the file cannot be converted.
    """
    reader = open_gguf(file)
    folder_of, architecture = str(file.parent), field(reader, "general.architecture")
    try:
        config = AutoConfig.from_pretrained(folder_of, gguf_file=file.name)
        for name, key in _EXPERT_SIZES.items():
            size = field(reader, f"{architecture}.{key}")
            if size is not None and hasattr(config, name):
                setattr(config, name, size)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder_of,
            config=config,
            gguf_file=file.name,
            dtype=_dtype(reader),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder_of, gguf_file=file.name)
    except _CONVERSION_ERRORS as error:
        raise ConfigError(
            f"{file} cannot be converted by transformers: {error}; use the model's safetensors "
            "folder"
        ) from error
    if report["missing_keys"]:
        # transformers would go on with random numbers in their place.
        raise ConfigError(
            f"{file} lacks the weights {sorted(report['missing_keys'])[0]!r} and "
            "maybe more; use the model's safetensors folder"
        )
    ends = _generation_ends(reader)
    if ends:
        model.generation_config.eos_token_id = ends
    completed = _completed(reader, tokenizer)
    completed.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    completed.save_pretrained(folder)
    save_groups(blocks_of(reader, unstacked(model)), folder)


def _generation_ends(reader: GGUFReader) -> list[int]:
    """The tokens that end a text, ascending; none where the file does not say."""
    found = {field(reader, f"tokenizer.ggml.{key}") for key in _END_KEYS}
    return sorted(int(token_id) for token_id in found if token_id is not None)


def _completed(reader: GGUFReader, tokenizer: Any) -> Any:
    """The tokenizer that transformers makes of the file, without the token that it adds, and with
    the splitting of digits that it leaves out."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    # A byte-level vocabulary without GPT-2's own <|endoftext|> is given one, which no row of the
    # model stands for and which would make the vocabulary another than the original's.
    num_tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["id"] < num_tokens
    ]
    backend = Tokenizer.from_str(json.dumps(description))
    if field(reader, "tokenizer.ggml.pre") in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    named = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if backend.token_to_id(str(token)) is not None
    }
    completed = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    completed.chat_template = tokenizer.chat_template
    return completed


def _dtype(reader: GGUFReader) -> torch.dtype:
    """The widest of the matrices' types; what is quantised was bfloat16 before, most likely."""
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return torch.float32
    if kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
        return torch.float16
    return torch.bfloat16
