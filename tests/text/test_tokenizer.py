"""Our tokenizer equals transformers' tokenizer, without torch."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.errors import ConfigError, RequestError
from cluster.text.tokenizer import Tokenizer

SAMPLES = (
    "",
    " ",
    "hello world",
    "  two  spaces and a tab\t.\n\n",
    "def main():\n    return 'naïve café 🙂'",
    "日本語 \u200d \x00 end",
    "<s>special</s> <|user|>in text<tool call>é!",
)
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "  spaces kept  "},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "🙂"},
]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encoding_and_decoding_equal_transformers(
    tokenizer: Tokenizer, reference: Any, text: str, add_special_tokens: bool
):
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert ids.dtype == "int32"
    assert ids.tolist() == reference.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        expected = reference.decode(ids.tolist(), skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_chat_template_equals_transformers(
    tokenizer: Tokenizer, reference: Any, add_generation_prompt: bool
):
    expected = reference.apply_chat_template(
        CONVERSATION, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    ids = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=add_generation_prompt)
    assert ids.tolist() == expected


def test_end_tokens_come_from_generation_config_and_tokenizer(tokenizer: Tokenizer, reference: Any):
    expected = sorted(reference.convert_tokens_to_ids(["<|user|>", "</s>"]))
    assert list(tokenizer.eos_token_ids) == expected


def test_a_truncation_saved_with_the_tokenizer_does_not_cut_prompts(folder: Path, tmp_path: Path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    long_text = "again and again " * 10
    expected = Tokenizer.load(folder).encode(long_text).tolist()
    assert Tokenizer.load(tmp_path).encode(long_text).tolist() == expected


def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer):
    text = "a naïve 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(int(token)) for token in ids)
    if tokenizer.is_byte_level:
        assert joined == text.encode()
    else:
        assert b"\xf0\x9f\x99\x82" in joined


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer):
    beyond = tokenizer.vocab_size + 5
    assert tokenizer.decode([beyond]) == ""
    assert tokenizer.token_text(beyond) == ""
    assert tokenizer.token_bytes(beyond) == b""


def test_lone_surrogates_are_a_request_error(tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="UTF-8"):
        tokenizer.encode("\ud800")


def test_a_folder_without_tokenizer_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
