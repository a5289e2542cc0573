"""The held-out split is fixed, and disjoint from the training text; the vocabulary is lossless, and
the chat template has the format of the training text."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.errors import ConfigError
from models.recipe.corpus import (
    SPECIAL_TOKENS,
    Document,
    encode_documents,
    load_corpus,
    render_turn,
    save_tokenizer,
    train_tokenizer,
)

PATHS = [f"package/module_{index}.py" for index in range(4000)]
HELD_OUT = [path for path in PATHS if Document("code", path, "").is_held_out]
LEARNT = [path for path in PATHS if path not in set(HELD_OUT)]
FROZEN = ["package/module_40.py", "package/module_46.py", "package/module_64.py"]


def lines(seed: int, num_lines: int = 30) -> str:
    return "".join(
        f"line {index} of document {seed} says something that no other line says\n"
        for index in range(num_lines)
    )


def read(root: Path, files: dict[str, str]) -> list[Document]:
    """The documents of a machine with these files of code and one of prose."""
    for path, text in {"prose/index.rst.txt": lines(1000), **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return load_corpus({"code": root, "prose": root / "prose"})


def code_paths(documents: list[Document]) -> list[str]:
    return [each.path for each in documents if each.kind == "code"]


def test_split_by_path_never_changes_and_holds_out_about_one_in_twenty():
    # Must not change: otherwise new models train on text that earlier models were measured on.
    assert HELD_OUT[:3] == FROZEN
    assert 0.8 < len(HELD_OUT) / len(PATHS) * 20 < 1.2


def test_text_in_both_parts_leaves_the_held_out_part(tmp_path: Path):
    near_copy = lines(1, num_lines=20) + lines(9, num_lines=10)
    files = {
        HELD_OUT[0]: lines(1).upper(),
        HELD_OUT[1]: lines(2),
        HELD_OUT[2]: near_copy,
        LEARNT[0]: lines(1),
        LEARNT[1]: lines(1).replace(" ", "  "),
    }
    found = code_paths(read(tmp_path, files))
    assert found == [LEARNT[0], HELD_OUT[1]]


def test_a_missing_corpus_names_the_package_to_install(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent; install python3"):
        load_corpus({"code": tmp_path / "absent", "prose": tmp_path})


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
def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerFast, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_and_come_first(tokenizer: PreTrainedTokenizerFast):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(5))
    assert tokenizer.encode("<|user|>") == [2]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.decode([2, 4], skip_special_tokens=True) == ""


def test_chat_template_spells_conversations_as_training_does(
    tokenizer: PreTrainedTokenizerFast,
):
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
):
    tokens = encode_documents(["one two", "three"], tokenizer).tolist()
    assert tokens.count(0) == 2
    assert tokens[-1] == 0
    assert tokenizer.decode(tokens) == "one two<|endoftext|>three<|endoftext|>"
