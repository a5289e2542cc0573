"""Text in the target's tokens: byte for byte what was drafted, and only ever added to."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from cluster.draft.text_bridge import BridgedDraft, TextBridge
from cluster.models.token_bytes import TokenBytes
from tests.support.checkpoints import byte_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo-target"
# What splits words, joins them, or has tokens of parts of characters.
_LETTERS = ("the", " the", " quick", "'", "'re", "'ll", "re", "12", "3", "...", "!", "<|im_end|>")
_BLANKS = (" ", "  ", "\n", " \n", "\r\n", "\t", "def f(x):\n    ", "\x00")
_WIDE = ("日本語", "テスト。", "🎉", "👩\u200d👩\u200d👧", "é", "e\u0301", "¾")
words = st.sampled_from((*_LETTERS, *_BLANKS, *_WIDE))
texts = st.lists(words | st.text(max_size=5), max_size=12).map("".join)
KINDS = ("merges", "bytes", "spaces")


@cache
def tokenizer_of(kind: str) -> TokenBytes:
    if kind == "merges":
        return TokenBytes.load(DEMO)
    if kind == "bytes":
        return TokenBytes(byte_tokenizer())
    return TokenBytes(_spaced())


def _spaced() -> PreTrainedTokenizerFast:
    """Of SentencePiece's kind: spaces belong to words, and nothing splits texts beforehand."""
    vocabulary = {"<unk>": 0, "<s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for string in ("▁", *"thequick", "▁t", "he", "▁the", "qu", "ick", "▁quick"):
        vocabulary.setdefault(string, len(vocabulary))
    pairs = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("q", "u"), ("i", "c"), ("ic", "k")]
    vocabulary.setdefault("ic", len(vocabulary))
    model = models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("kind", KINDS)
@given(drafts=st.lists(st.tuples(texts, texts), min_size=10, max_size=10), data=st.data())
def test_a_draft_becomes_tokens_of_its_bytes_that_are_only_added_to(
    kind: str, drafts: list[tuple[str, str]], data: st.DataObject
) -> None:
    """As it comes in pieces that may end within characters.  Behind its end nothing is left."""
    tokenizer = tokenizer_of(kind)
    bridge = TextBridge(tokenizer)
    for before, draft in drafts:
        whole = draft.encode()
        ends = [*sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6))), len(whole)]
        bridged, former, start = BridgedDraft(bridge, before.encode()), list[int](), 0
        for end in ends:
            assert bridged.extend(whole[start:end])
            bridged.settle()
            assert bridged.chain[: len(former)] == former
            assert whole.startswith(tokenizer.decode(bridged.chain))
            former, start = list(bridged.chain), end
        bridged.end()
        bridged.settle()
        assert bridged.chain[: len(former)] == former
        assert tokenizer.decode(bridged.chain) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(before=texts, draft=texts, more=texts)
def test_what_is_settled_is_what_the_whole_text_has(
    kind: str, before: str, draft: str, more: str
) -> None:
    """Where the whole text has a token's beginning behind `before` at all."""
    tokenizer = tokenizer_of(kind)
    bridge, words = TextBridge(tokenizer), before + draft + more
    settled = bridge.tokens(before.encode(), draft.encode(), is_whole=False)
    ids, begins = tokenizer.encode(words), [0]
    for each in ids:
        begins.append(begins[-1] + len(tokenizer.bytes_of[each]))
    start = len(before.encode())
    if start in begins and tokenizer.decode(ids) == words.encode():
        first = begins.index(start)
        assert ids[first : first + len(settled)] == settled


@pytest.mark.parametrize("kind", KINDS)
@given(before=texts, draft=texts, more=texts, data=st.data())
def test_a_text_that_goes_as_drafted_keeps_its_draft(
    kind: str, before: str, draft: str, more: str, data: st.DataObject
) -> None:
    """In the draft's tokens, or in others of the same bytes; in others it goes another way."""
    tokenizer = tokenizer_of(kind)
    bridge, whole = TextBridge(tokenizer), draft.encode()
    bridged = BridgedDraft(bridge, before.encode())
    bridged.extend(whole)
    bridged.end()
    bridged.settle()
    count = data.draw(st.integers(0, len(bridged.chain)))
    passed = bridged.chain[:count]
    if data.draw(st.booleans()):  # in single bytes
        passed = [tokenizer.write(bytes([byte]))[0][0] for byte in tokenizer.decode(passed)]
    rest = whole[len(tokenizer.decode(passed)) :]
    for token in passed:
        assert bridged.follow([token])
    bridged.settle()
    assert bridged.rest == rest
    assert rest.startswith(tokenizer.decode(bridged.chain))
    if rest:
        other = bytes([rest[0] ^ 1])
        assert not bridged.follow(tokenizer.write(other)[0])


def test_a_word_that_was_begun_is_continued_within_it() -> None:
    tokenizer = tokenizer_of("merges")
    bridge = TextBridge(tokenizer)
    (token,) = tokenizer.encode(" the")
    parts = tokenizer.encode(" th")
    found = bridge.tokens(tokenizer.decode(parts), b"e end of", is_whole=False)
    assert tokenizer.decode(found) == b"e end"
    assert bridge.tokens(b"at", b" the end of", is_whole=False)[0] == token


def test_what_may_still_change_is_left_out() -> None:
    tokenizer = tokenizer_of("merges")
    bridge = TextBridge(tokenizer)

    def settled(draft: str) -> bytes:
        return tokenizer.decode(bridge.tokens(b"say", draft.encode(), is_whole=False))

    assert settled("") == settled(" wor") == b""
    assert settled(" words they'r") in (b" words they", b" words they'")
    assert settled(" words.\n ") == b" words."
    assert tokenizer.decode(bridge.tokens(b"", b"end", is_whole=True)) == b"end"


def test_a_character_that_the_tokenizer_reads_as_another_is_drafted_byte_by_byte() -> None:
    tokenizer, draft = tokenizer_of("spaces"), " the quick ▁ the quick".encode()
    bridge = TextBridge(tokenizer)
    begun = bridge.tokens(b"", draft, is_whole=False)
    assert tokenizer.decode(begun) == b" the quick"
    assert tokenizer.decode(bridge.tokens(b"", draft, is_whole=True)) == draft


def test_marks_stand_in_texts_by_their_spelling_or_not_at_all() -> None:
    tokenizer = tokenizer_of("bytes")
    (mark, token_id) = next(iter(tokenizer.marks.items()))
    ids = [*tokenizer.encode("a"), token_id, *tokenizer.encode("b"), 10_000, -1]
    assert TextBridge(tokenizer).text_of(ids) == f"a{mark}b".encode()
    assert TextBridge(tokenizer, with_marks=False).text_of(ids) == b"ab"
