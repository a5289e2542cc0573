"""Any bytes can be written in a tokenizer's tokens, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.models.token_bytes import TokenBytes, unfinished_len
from tests.support.errors import config_error
from tests.support.text.tokenizers_for_tests import byte_fallback_folder, byte_level_folder

MARKS = ("<s>", "</s>", "<|user|>")


@pytest.fixture(scope="module", params=[byte_level_folder, byte_fallback_folder])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: Any) -> TokenBytes:
    return TokenBytes.load(request.param(tmp_path_factory.mktemp("tokenizer")))


BYTES = st.one_of(
    st.text().map(str.encode),
    st.binary(),
    st.lists(st.sampled_from((*MARKS, "🙂", "日本", "\r\n", "\t", "  ", "naïve", "é!"))).map(
        lambda parts: "".join(parts).encode()
    ),
)


@given(BYTES)
def test_what_is_written_has_the_same_bytes(vocabulary: TokenBytes, data: bytes):
    ids, is_all = vocabulary.write(data)
    assert is_all
    assert vocabulary.decode(ids) == data
    assert not {*ids} & {*vocabulary.marks.values()}, "marks in a text are text"


@given(st.binary(max_size=12))
def test_unfinished_bytes_are_those_that_a_continuation_can_complete(data: bytes):
    count = unfinished_len(data)
    whole, rest = data[: len(data) - count], data[len(data) - count :]
    assert unfinished_len(whole + b"a") == 0
    if rest:  # the lead byte says how many belong to it
        assert rest[0] >= 0xC2
        assert len(rest) < 2 + (rest[0] >= 0xE0) + (rest[0] >= 0xF0)


def test_bytes_that_a_vocabulary_lacks_are_left_out_and_told():
    words = {"a": 0, "b": 1, " ": 2, "A": 3, "c": 4, "D": 5, "d": 6}
    backend = Tokenizer(models.BPE(words, []))
    vocabulary = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert vocabulary.write("a🙂b".encode()) == ([0, 1], False)
    assert vocabulary.write(b"a\xffb") == ([0, 1], False)


@pytest.mark.parametrize(
    ("part", "changed", "complaint"),
    [
        ("normalizer", normalizers.NFKC(), "reads 'ﬁ ½ "),
        ("normalizer", normalizers.Lowercase(), "reads 'Ab  cD' as 'ab  cd'"),
        (
            "normalizer",
            normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
            "another text",
        ),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "loses spaces"),
    ],
)
def test_a_tokenizer_that_changes_texts_is_refused(
    part: str, changed: Any, complaint: str, tmp_path: Path
):
    pretrained = PreTrainedTokenizerFast.from_pretrained(byte_level_folder(tmp_path))
    setattr(pretrained.backend_tokenizer, part, changed)
    with config_error(complaint):
        TokenBytes(pretrained)


def test_decomposed_characters_are_written_whatever_the_tokenizer_composes(tmp_path: Path):
    pretrained = PreTrainedTokenizerFast.from_pretrained(byte_level_folder(tmp_path))
    pretrained.backend_tokenizer.normalizer = normalizers.NFC()
    vocabulary, data = TokenBytes(pretrained), "cafe\u0301 au lait".encode()
    ids, is_all = vocabulary.write(data)
    assert is_all
    assert vocabulary.decode(ids) == data


def test_no_space_is_put_before_a_piece_and_the_opening_marks_are_known(tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    pretrained = PreTrainedTokenizerFast.from_pretrained(byte_fallback_folder(tmp_path))
    backend = pretrained.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[
            ("<s>", backend.token_to_id("<s>")),
            ("</s>", backend.token_to_id("</s>")),
        ],
    )
    vocabulary = TokenBytes(pretrained)
    assert vocabulary.decode(vocabulary.encode("fox")) == b"fox"
    assert vocabulary.decode(backend.encode("fox").ids) == b" fox"
    assert vocabulary.opening == (backend.token_to_id("<s>"),)
    assert vocabulary.ends == (backend.token_to_id("</s>"),)
