"""Tiny random checkpoints: ordinary Hugging Face folders that load in milliseconds.

The weights are drawn wider than training would, so that greedy text does not loop at once and a
wrong mask or position changes it.  The tokenizer is byte-level: every id decodes to something.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from tests.support.architectures import BY_TEXT, DEFAULT_VOCAB_SIZE, EOS_TOKEN_ID, REFUSED, SERVED

SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_checkpoint(
    architecture: str,
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    dtype: torch.dtype = torch.float32,
    init_std: float = 0.25,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint with its tokenizer into `folder`, which is made; returns it.

    architecture: a key of SERVED, BY_TEXT or REFUSED.  vocab_size: at least 8; below 260 the
    tokenizer knows only the first bytes, ASCII first.  config_overrides: fields of the model's
    config, of a model of images and text of its text's part.
    """
    model_type, fields = {**SERVED, **BY_TEXT, **REFUSED}[architecture]
    own = {
        "vocab_size": vocab_size,
        "bos_token_id": EOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 1,
        "initializer_range": init_std,
        **config_overrides,
    }
    if architecture in BY_TEXT:
        own = {"text_config": {**fields["text_config"], **own}}
    config = AutoConfig.for_model(model_type, **copy.deepcopy({**fields, **own}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if architecture in BY_TEXT:
            factory = AutoModelForImageTextToText
        model = factory.from_config(config).to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # else nearly all heads forget within a token
                torch.nn.init.uniform_(parameter, -5.0, -1.0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer(vocab_size).save_pretrained(folder)
    return folder


def noisy_copy(checkpoint: Path, folder: Path) -> Path:
    """A drafter that often agrees with `checkpoint`: its weights plus relative Gaussian noise."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                scale = 0.05 * float(parameter.float().std())
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.add_((drawn * scale).to(parameter.dtype))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


def byte_tokenizer(vocab_size: int = DEFAULT_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Four special tokens, then one token per byte, then pairs of letters up to vocab_size."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    letters = "etaoinsrhldcumfpgwybvk"
    merges: list[tuple[str, str]] = []
    for character in _byte_characters():
        if len(vocabulary) < vocab_size:
            vocabulary[character] = len(vocabulary)
    for first in letters:
        for second in letters:
            if len(vocabulary) < vocab_size:
                vocabulary[first + second] = len(vocabulary)
                merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=SPECIAL_TOKENS[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        unk_token=SPECIAL_TOKENS[1],
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _byte_characters() -> list[str]:
    """The characters that stand for bytes in byte-level BPE, printable ASCII first."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return sorted(alphabet, key=lambda character: (not 32 < ord(character) < 127, ord(character)))
