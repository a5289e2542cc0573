"""The tokenizer and chat template of one model folder, and decoders of tokens as they come.

Does not import torch: processes without a model use the tokenizer too.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import decoders

from cluster.core import TokenArray
from cluster.errors import ConfigError, RequestError
from cluster.models.fingerprint import load_pretrained_tokenizer, token_strings, tokenizer_hash
from cluster.models.token_bytes import BYTE_FALLBACK, byte_table
from cluster.text.chat import ChatTemplate, read_template
from cluster.text.generation_config import AUTO, load_eos_token_ids

# Incremental decoding of tokens to text, without decoding final text again: both classes have the
# same contract.  `feed` returns text that later tokens cannot change, `flush` returns the rest, and
# the concatenation equals decoding all tokens at once.

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
        return self._pending_text()

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


class Tokenizer:
    """A model's tokenizer, equal to transformers' AutoTokenizer on the same folder.

    Thread-safe.  hash: over the token strings in id order.  vocab_size: highest id + 1.
    eos_token_ids: every token that ends a text, by generation config and tokenizer, ascending.
    special_ids: tokens without text.  is_byte_level: every token has fixed bytes.
    render_chat, chat_template: `ChatTemplate.render`, and its source, "" without one.
    backend: the `tokenizers.Tokenizer` itself.  pretrained: transformers' tokenizer around it.
    """

    def __init__(self, pretrained: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """pretrained: a transformers tokenizer with a `tokenizers` backend."""
        backend = getattr(pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(pretrained).__name__} has no fast tokenizer; save the model's tokenizer as "
                "tokenizer.json (transformers' save_pretrained of a fast tokenizer)"
            )
        # The ingress checks lengths: a truncation saved in the file would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.pretrained = pretrained
        strings = token_strings(pretrained.get_vocab())
        self.vocab_size = len(strings)
        self.hash = tokenizer_hash(strings)
        chat = ChatTemplate(pretrained)
        self.render_chat, self.chat_template = chat.render, chat.source
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.eos_token_ids = tuple(sorted({*eos_token_ids, pretrained.eos_token_id} - {None}))

    @classmethod
    def load(
        cls, folder: str | Path, *, generation_config: str = AUTO, chat_template: str = ""
    ) -> Tokenizer:
        """Read a Hugging Face folder; raises ConfigError if it has no usable tokenizer.

        generation_config: `target.generation_config`, which may define end-of-sequence tokens.
        chat_template: `answers.chat_template`, a file in place of the model's own template.
        """
        folder = Path(folder)
        pretrained = load_pretrained_tokenizer(folder)
        if chat_template:
            pretrained.chat_template = read_template(chat_template)
        return cls(pretrained, load_eos_token_ids(folder, generation_config))

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        return byte_table(self.backend)

    @cached_property
    def _visible_bytes_of(self) -> list[bytes]:
        special = self.special_ids
        return [b"" if i in special else data for i, data in enumerate(self._bytes_of)]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenArray:
        """Token ids of `text`, int32[n]; with the model's BOS/EOS if it has them."""
        try:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise RequestError(
                "the text contains lone surrogates; send valid UTF-8", param="prompt"
            ) from error
        return np.asarray(encoding.ids, dtype=np.int32)

    def decode(
        self, token_ids: Sequence[int] | TokenArray, *, skip_special_tokens: bool = True
    ) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token decoded alone, special tokens included; for lists of log-probabilities."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, incomplete UTF-8 included (OpenAI's `bytes` field)."""
        if self.is_byte_level:
            return self._bytes_of[token_id] if 0 <= token_id < self.vocab_size else b""
        token = self.backend.id_to_token(token_id)
        byte = None if token is None else BYTE_FALLBACK.fullmatch(token)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return self.token_text(token_id).encode()

    def detokenizer(
        self, context_ids: Sequence[int] | TokenArray = (), *, skip_special_tokens: bool = True
    ) -> Detokenizer:
        """An incremental decoder for one sequence that continues `context_ids`."""
        if self.is_byte_level:
            table = self._visible_bytes_of if skip_special_tokens else self._bytes_of
            return ByteDetokenizer(table)
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        decode = partial(self.decode, skip_special_tokens=False)
        return WindowDetokenizer(decode, skipped, context_ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> TokenArray:
        """Token ids of a conversation, int32[n], ready for a model.  options: of `render_chat`."""
        # The template already contains the special tokens; a second BOS would be wrong.
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)
