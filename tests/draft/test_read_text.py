"""Texts are read on by their bytes, whichever vocabularies the target and the draft model have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from cluster.core import token_array
from cluster.draft.intersection import Intersection, RewrittenText
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.models.token_bytes import TokenBytes
from tests.support.checkpoints import byte_tokenizer
from tests.support.draft.other_vocabulary import letters_tokenizer
from tests.support.text.tokenizers_for_tests import byte_fallback_folder, byte_level_folder

DEMO = Path("models/demo-draft")
PIECES = (
    "🙂",
    "👩‍👩‍👧",
    "日本語",
    "naïve café",
    "\r\n",
    "\t",
    "   ",
    "\n\n\n",
    "print(x)",
    " the quick",
    "1234",
    "<s>",
    "<|user|>",
    "é!",
    "\u0301",
)
TEXTS = st.one_of(
    st.text().map(str.encode),
    st.binary(max_size=40),
    st.lists(st.sampled_from(PIECES)).map(lambda parts: "".join(parts).encode()),
    # Characters that are cut off.
    st.lists(st.tuples(st.sampled_from(PIECES), st.integers(0, 3))).map(
        lambda parts: b"".join(text.encode()[: len(text.encode()) - n] for text, n in parts)
    ),
)


class Pair:
    """A target's vocabulary and a draft model's, with a way back from what the latter reads."""

    def __init__(self, target: TokenBytes, draft: TokenBytes, specials: Any = "drop") -> None:
        sizes = len(target.bytes_of), len(draft.bytes_of)
        self.target, self.draft = target, draft
        self.shared = Intersection(target, draft, *sizes, specials)

    def bytes_of(self, read: RewrittenText) -> bytes:
        return self.draft.decode(self.shared.order[read.log.token_ids].tolist())


@pytest.fixture(scope="module", params=["bytes", "pieces", "from pieces"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    demo = TokenBytes.load(DEMO)
    of_bytes = TokenBytes.load(byte_level_folder(tmp_path_factory.mktemp("bytes")))
    of_pieces = TokenBytes.load(byte_fallback_folder(tmp_path_factory.mktemp("pieces")))
    found = {
        "bytes": (of_bytes, demo),
        "pieces": (demo, of_pieces),
        "from pieces": (of_pieces, of_bytes),
    }
    return Pair(*found[request.param])


def chunks(data: st.DataObject, token_ids: Sequence[int]) -> list[list[int]]:
    found, start = [], 0
    while start < len(token_ids):
        size = data.draw(st.integers(1, 5))
        found.append(list(token_ids[start : start + size]))
        start += size
    return found


@given(data=st.data())
def test_what_is_read_has_the_bytes_of_the_text_and_is_only_read_on(
    pair: Pair, data: st.DataObject
):
    tokens, _ = pair.target.write(data.draw(TEXTS))
    # Tokens that no tokenizer would put side by side.
    tokens += data.draw(st.lists(st.integers(0, len(pair.target.bytes_of) - 1), max_size=8))
    read, text = RewrittenText(pair.shared), list[int]()
    for chunk in chunks(data, tokens):
        before = read.log.token_ids.copy()
        text += chunk
        read.append(token_array(chunk))
        assert np.array_equal(read.log.token_ids[: len(before)], before)
        assert read.num_read == len(text)
        assert read.len_at(len(text)) == len(read.log)
        whole = pair.target.decode(text)
        held = pair.bytes_of(read)
        assert whole.startswith(held)
        assert read.is_behind == (len(held) < len(whole))
        if data.draw(st.integers(0, 3)) == 0:
            length = data.draw(st.integers(0, len(text)))
            read.truncate(length)
            del text[length:]
            assert read.num_read in (0, length), "what was read as one text goes as a whole"
            read.append(token_array(text[read.num_read :]))
            assert pair.target.decode(text).startswith(pair.bytes_of(read))


@given(data=st.data())
def test_a_shared_token_is_read_as_itself_behind_a_whole_character(pair: Pair, data: st.DataObject):
    written = pair.shared.vocabulary.target_ids
    nodes = data.draw(st.lists(st.sampled_from(written.tolist()), min_size=1, max_size=6))
    read = RewrittenText(pair.shared)
    read.append(token_array(pair.target.write(b"a word")[0]))
    length = len(read.log)
    read.append(token_array(nodes))
    assert read.log.token_ids[length:].tolist() == np.searchsorted(written, nodes).tolist()
    # So rolling back into a tree's path keeps the nodes before.
    read.truncate(read.num_read - 1)
    assert len(read.log) == length + len(nodes) - 1


def test_what_a_vocabulary_lacks_is_skipped_and_nothing_drafted_behind_it(tmp_path: Path):
    letters_tokenizer(8, tmp_path / "letters")
    target = TokenBytes.load(byte_level_folder(tmp_path))
    pair = Pair(target, TokenBytes.load(tmp_path / "letters"))
    read = RewrittenText(pair.shared)
    for text, expected, is_behind in (
        ("a", b"a", False),
        ("x", b"a", True),
        ("b", b"ab", False),
        ("🙃", b"ab", True),
    ):
        read.append(token_array(target.write(text.encode())[0]))
        assert (pair.bytes_of(read), read.is_behind) == (expected, is_behind)


@pytest.mark.parametrize(("specials", "expected"), [("text", "a<|user|>b"), ("drop", "ab")])
def test_marks_that_the_model_lacks_are_spelled_or_dropped(
    specials: str, expected: str, tmp_path: Path
):
    target, draft = TokenBytes.load(byte_level_folder(tmp_path)), TokenBytes(byte_tokenizer())
    pair = Pair(target, draft, specials)
    mark, end = target.marks["<|user|>"], target.ends[0]
    read = RewrittenText(pair.shared)
    read.append(token_array([*target.encode("a"), mark, *target.encode("b")]))
    assert pair.bytes_of(read).decode() == expected
    read.append(token_array([end]))
    assert pair.shared.order[read.log.token_ids[-1]] == draft.ends[0], "the end is the end"


def ending_turns() -> TokenBytes:
    """A chat model's tokenizer that has the mark for the end of a document beside its own."""
    state = byte_tokenizer().backend_tokenizer.to_str().replace("<|end|>", "<|endoftext|>")
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state), eos_token="<|im_end|>"
    )
    return TokenBytes(made)


@pytest.mark.parametrize("specials", ["text", "drop"])
def test_the_end_of_a_turn_is_read_and_written_whatever_it_is_called(specials: str):
    chat, demo = ending_turns(), TokenBytes.load(DEMO)
    document = TokenBytes(load_pretrained_tokenizer(DEMO))  # no `<|end|>` is declared
    for target, draft, end, own in (
        (chat, demo, "<|im_end|>", "<|end|>"),
        (demo, chat, "<|end|>", "<|im_end|>"),
        (demo, chat, "<|endoftext|>", "<|endoftext|>"),
        (document, chat, "<|endoftext|>", "<|im_end|>"),
    ):
        pair = Pair(target, draft, specials)
        written = pair.shared.vocabulary.target_ids.tolist()
        assert pair.shared.order[written.index(target.marks[end])] == draft.marks[own]
        read = RewrittenText(pair.shared)
        read.append(token_array([*target.encode("a"), target.marks[end]]))
        assert pair.shared.order[read.log.token_ids[-1]] == draft.marks[own]
        assert len({*pair.shared.order.tolist()}) == len(draft.bytes_of)


def test_the_models_opening_mark_stands_before_every_text_once(tmp_path: Path):
    tokenizer = byte_tokenizer()
    start = tokenizer.backend_tokenizer.token_to_id("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    draft = TokenBytes(tokenizer)
    for target in (TokenBytes.load(byte_level_folder(tmp_path)), draft):
        pair = Pair(target, draft)
        read = RewrittenText(pair.shared)
        read.append(token_array([*target.opening, *target.encode("a word")]))
        assert pair.shared.order[read.log.token_ids].tolist() == [start, *draft.encode("a word")]
