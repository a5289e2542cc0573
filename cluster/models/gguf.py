"""Converts a GGUF file into an ordinary Hugging Face folder, so that all else knows one kind.

transformers unpacks the weights and rebuilds config and tokenizer; what it leaves is added here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
)

from cluster.errors import ConfigError
from cluster.models.gguf_blocks import blocks_of
from cluster.models.gguf_file import field, open_gguf
from cluster.models.grouped_file import save_groups

# llama.cpp splits these vocabularies' text as GPT-2 does, but every digit from its neighbours
# (`llm_tokenizer_bpe` in src/llama-vocab.cpp); transformers leaves out the digits.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# The last two end a turn, where the first may only end a document.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONVERSION_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    RuntimeError,
    NotImplementedError,
    ImportError,
)


def convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer, chat template and generation config of `file` into `folder`.

    16-bit weights stay as they are and quantised ones become bfloat16, so it needs memory and disk
    for two bytes a parameter.  Linear layers' blocks are kept beside them (`grouped_file`).  Raises
    ConfigError where the file cannot be converted.
    """
    reader = open_gguf(file)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=_dtype(reader),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
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
    save_groups(blocks_of(reader, model), folder)


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
