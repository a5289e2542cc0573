"""The vocabulary is lossless, and the chat template has the format of the training text."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.recipe.corpus import (
    SPECIAL_TOKENS,
    encode_documents,
    render_turn,
    save_tokenizer,
    train_tokenizer,
)

TEXTS = (
    "def area(width, height):\n    return width * height\n",
    "\n\n\t tabs\tand   spaces  \n",
    "naïve café 日本語 🙂 \u0000\n",
    "0123456789 12.5e-3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(TEXTS * 5, vocab_size=300), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [*TEXTS, "never seen: ß∂ƒ"])
def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_and_come_first(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))
    assert tokenizer.encode("<|user|>") == [2]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.decode([2, 4], skip_special_tokens=True) == ""


def test_chat_template_spells_conversations_as_training_does(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Yes."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|system|>Be brief.<|end|>" + render_turn("Hello?", "Yes.")
    asked = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert render_turn("Hello?", "Yes.").startswith(
        asked.removeprefix("<|system|>Be brief.<|end|>")
    )
    assert asked.endswith("<|end|><|assistant|>")


def test_encoded_documents_end_with_the_end_of_text_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokens = encode_documents(["one two", "three"], tokenizer).tolist()
    assert tokens.count(0) == 2
    assert tokens[-1] == 0
    assert tokenizer.decode(tokens) == "one two<|endoftext|>three<|endoftext|>"
