"""Writes text that another vocabulary has drafted in the target's tokens.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", string-level exact match: the last whole word of the text and the draft
are encoded together, and what later text might still change is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

from cluster.models.token_bytes import TokenBytes, unfinished_len

# The last word is looked for in so many bytes; a longer one is cut.
_CONTEXT_BYTES = 64
_LAST_WORD = re.compile(r"\s*\S*\Z")
# What moves the end of a token that stands one word before the end: contractions ("'" before "r" is
# a token of "'re"), and line breaks, which take the spaces before them.
_FOLLOWERS = ("e", "l", "\n")


class TextBridge:
    """The target's side of the bridge.

    tokenizer: the target's.  with_marks: special marks stand in texts by their spelling, else they
    are left out.
    """

    def __init__(self, tokenizer: TokenBytes, *, with_marks: bool = True) -> None:
        self._tokenizer = tokenizer
        self._written = list(tokenizer.bytes_of)
        if with_marks:
            for spelling, token_id in tokenizer.marks.items():
                self._written[token_id] = spelling.encode()

    def text_of(self, token_ids: Iterable[int]) -> bytes:
        """Return the bytes of tokens; ids beyond the vocabulary have none."""
        table = self._written
        return b"".join([table[each] for each in token_ids if 0 <= each < len(table)])

    def tokens(self, before: bytes, draft: bytes, *, is_whole: bool) -> list[int]:
        """Return the tokens of `draft` behind a text that ends with `before`.

        Their bytes are a prefix of the draft's.  is_whole: nothing follows; else the tokens are
        left out that would be others if something did.  None come while the text ends within a
        character, or where the target's tokenizer has not the draft's bytes.
        """
        try:
            text = draft[: len(draft) - unfinished_len(draft)].decode()
        except UnicodeDecodeError:
            return []
        for context in dict.fromkeys((_last_word(before), "")):
            found = self._behind(context, text, is_whole=is_whole)
            if found is not None:
                return found
        # The tokenizer reads a character of it as another one, as SentencePiece does "▁".
        if is_whole:
            written, is_all = self._tokenizer.write(text.encode())
            return written if is_all else []
        return self.tokens(before, text[: len(text) // 2].encode(), is_whole=False)

    def _behind(self, context: str, draft: str, *, is_whole: bool) -> list[int] | None:
        """Return the tokens of `draft` where one begins with it, None where none does."""
        text = context + draft
        ids, words = self._tokenizer.words(text)
        pieces = [self._tokenizer.bytes_of[each] for each in ids]
        begins = [0, *accumulate(map(len, pieces))]
        start = len(context.encode())
        if start not in begins or b"".join(pieces) != text.encode():
            return None
        count = len(ids) if is_whole else self._num_settled(ids, words, pieces)
        return ids[begins.index(start) : count]

    def _num_settled(
        self, ids: Sequence[int], words: Sequence[int], pieces: Sequence[bytes]
    ) -> int:
        """Return how many of the tokens stay as they are whatever follows the last of them."""
        last = words.index(words[-1]) if words else 0
        if last == 0:
            return 0
        before = words.index(words[last - 1])
        tail = b"".join(pieces[before:]).decode()
        for follower in _FOLLOWERS:
            found, _ = self._tokenizer.words(tail + follower)
            if found[: last - before] != ids[before:last]:
                return before
        return last


class BridgedDraft:
    """A text's continuation as another engine writes it, in the target's tokens.

    chain: the tokens behind the text, as far as they are settled.  Only what the text has passed is
    taken from it, and only at its end is something added.
    """

    def __init__(self, bridge: TextBridge, before: bytes) -> None:
        """before: the end of the text that is continued."""
        self._bridge = bridge
        self._before = before[-_CONTEXT_BYTES:]
        self._draft = bytearray()
        self._text = bytearray()  # that has come since
        self._num_compared = 0
        self.chain: list[int] = []
        self._begin = self._end = 0  # of the chain, in the draft
        self._is_new = False  # something may be added
        self._is_whole = False

    @property
    def rest(self) -> bytes:
        """What is drafted behind the text."""
        return bytes(self._draft[len(self._text) :])

    @property
    def is_behind(self) -> bool:
        """True if the text has passed all that is drafted."""
        return len(self._text) > len(self._draft)

    def extend(self, data: bytes) -> bool:
        """Add what the engine says next; False where the text has gone on otherwise."""
        self._draft += data
        self._is_new = self._is_new or bool(data)
        return self._agrees()

    def end(self) -> None:
        """The engine says no more: the text ends behind the draft."""
        self._is_whole = self._is_new = True

    def follow(self, token_ids: Iterable[int]) -> bool:
        """Take in what the text has gone on with; False where that is not what is drafted."""
        self._text += self._bridge.text_of(token_ids)
        while self.chain and self._begin + self._len_of(self.chain[0]) <= len(self._text):
            self._begin += self._len_of(self.chain.pop(0))
        if self._begin != len(self._text):  # the text has the same bytes in other tokens
            self.chain.clear()
            self._begin = self._end = len(self._text)
            self._is_new = True
        return self._agrees()

    def settle(self) -> None:
        """Add to the chain what is settled by now."""
        if not self._is_new or self._end >= len(self._draft):
            return
        self._is_new = False
        before = (self._before + self._draft[: self._end])[-_CONTEXT_BYTES:]
        draft = bytes(self._draft[self._end :])
        found = self._bridge.tokens(before, draft, is_whole=self._is_whole)
        self.chain += found
        self._end += len(self._bridge.text_of(found))

    def _len_of(self, token_id: int) -> int:
        return len(self._bridge.text_of((token_id,)))

    def _agrees(self) -> bool:
        start, end = self._num_compared, min(len(self._draft), len(self._text))
        self._num_compared = end
        return self._draft[start:end] == self._text[start:end]


def _last_word(before: bytes) -> str:
    found = _LAST_WORD.search(before[-_CONTEXT_BYTES:].decode(errors="ignore"))
    return found.group() if found else ""
