"""Incremental decoding of tokens to text, without decoding final text again.

Both classes have the same contract: `feed` returns text that later tokens cannot change, `flush`
returns the rest, and the concatenation equals decoding all tokens at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from cluster.core import TokenArray

REPLACEMENT = "\ufffd"

# UTF-8 characters have at most four bytes, so this many tokens without a complete character cannot
# be one incomplete character.
_MAX_INCOMPLETE_TOKENS = 4
# Decoders depend on at most the last word of the prompt.
_NUM_CONTEXT_TOKENS = 8


class ByteDetokenizer:
    """For byte-level vocabularies: each token has fixed bytes, decoded as one UTF-8 stream.

    Also exact for malformed UTF-8: Python and Rust replace the same maximal subparts.
    """

    def __init__(self, bytes_of: Sequence[bytes]) -> None:
        """bytes_of: the bytes of every token id, empty for tokens without text."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Add the next tokens; returns the text that is now final."""
        bytes_of = self._bytes_of
        num_tokens = len(bytes_of)
        # Ids beyond the vocabulary (padded embeddings) have no text, as in transformers.
        return self._decoder.decode(
            b"".join([bytes_of[token] for token in token_ids if 0 <= token < num_tokens])
        )

    def flush(self) -> str:
        """End the sequence; returns the rest of the text, incomplete characters as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For other vocabularies: decodes a window of the last few tokens and returns the difference.

    The tokens of the last piece of text stay in the window, because decoders treat the first token
    of a text differently (they strip its leading space).  The result equals decoding at once except
    after malformed UTF-8 in byte-fallback tokens: there a decoder would change whole characters
    before the malformed byte, but text that was already returned is not changed.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        skipped_ids: frozenset[int],
        context_ids: Sequence[int] | TokenArray,
    ) -> None:
        """decode: converts tokens to text.  skipped_ids: tokens without text.

        context_ids: the prompt that the text continues.
        """
        self._decode = decode
        self._skipped_ids = skipped_ids
        last = map(int, context_ids[-_NUM_CONTEXT_TOKENS:])
        self._prefix = [token for token in last if token not in skipped_ids]
        self._prefix_text = decode(self._prefix) if self._prefix else ""
        self._pending: list[int] = []
        self._num_incomplete = 0  # consecutive pending tokens that ended inside a character

    def feed(self, token_ids: Iterable[int]) -> str:
        """Add the next tokens; returns the text that is now final."""
        pieces = []
        for token in token_ids:
            if token in self._skipped_ids:
                continue
            self._pending.append(token)
            text = self._pending_text()
            if not text:
                continue
            if text.endswith(REPLACEMENT):
                self._num_incomplete += 1
                if self._num_incomplete < _MAX_INCOMPLETE_TOKENS:
                    continue
            pieces.append(text)
            self._advance()
        return "".join(pieces)

    def flush(self) -> str:
        """End the sequence; returns the rest of the text, incomplete characters as U+FFFD."""
        text = self._pending_text() if self._pending else ""
        self._pending.clear()
        return text

    def _pending_text(self) -> str:
        text = self._decode(self._prefix + self._pending)
        if text.startswith(self._prefix_text):
            return text[len(self._prefix_text) :]
        # The decoder changed text that was already returned.
        return self._decode(self._pending)

    def _advance(self) -> None:
        self._prefix, self._pending = self._pending, []
        self._num_incomplete = 0
        self._prefix_text = self._decode(self._prefix)


Detokenizer = ByteDetokenizer | WindowDetokenizer
