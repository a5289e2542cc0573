"""Tokens as bytes: what each token of a tokenizer stands for, and how it writes any bytes."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from cluster.models.fingerprint import load_pretrained_tokenizer, token_strings, tokenizer_hash

# The tokens that end a text, as a model's folder declares them.


GENERATION_CONFIG = "generation_config.json"


def eos_token_ids(model: Path, generation: Path | None = None) -> tuple[int, ...]:
    """Return eos_token_id of the generation config, or of the model's config.json if that has none.

    model: the model's folder.  generation: the folder of the generation config, None = the same.
    Raises ConfigError for an invalid file."""
    for path in ((generation or model) / GENERATION_CONFIG, model / "config.json"):
        value = read_object(path).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, an empty one where there is no file; raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values


BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"
# Bytes that are no UTF-8, as Python reads them with `surrogateescape`.
_BROKEN = re.compile("([\udc80-\udcff]+)")
# Texts that tokenizers change where they change common ones: by case, accents, width, blanks.  NFC
# changes rare ones alone, which `write` finds out.
_PROBES = ("Ab  cD", " a\tb \n\n", "é", "ﬁ ½ \uff21", "don ' t ,", "\u00a0\u200b")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes.

    Printable bytes map to themselves; the others are the characters from U+0100 on, in order.
    Radford et al. 2019, `bytes_to_unicode`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of one token, as in tokenizers' ByteLevel decoder.

    A token with a character outside the alphabet (an added token with a space, for example) is
    encoded as UTF-8.
    """
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")


def _sentence_piece_bytes(token: str) -> bytes:
    """The bytes of one token of SentencePiece's kind, a space at its beginning included."""
    byte = BYTE_FALLBACK.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace(_METASPACE, " ").encode("utf-8", errors="replace")


def byte_table(backend: Any) -> list[bytes]:
    """The bytes of every token id of a `tokenizers.Tokenizer`, special marks by their spelling."""
    decoder = json.loads(backend.to_str())["decoder"]
    is_byte_level = any(part["type"] == "ByteLevel" for part in _parts(decoder))
    bytes_of = _byte_level_bytes if is_byte_level else _sentence_piece_bytes
    return [bytes_of(string) for string in token_strings(backend.get_vocab(with_added_tokens=True))]


def unfinished_len(data: bytes) -> int:
    """The number of bytes at the end that begin a character of UTF-8 and do not complete it."""
    tail = data[-3:]  # characters have at most four
    return len(tail) - codecs.utf_8_decode(tail, "replace", False)[1]


class TokenBytes:
    """A tokenizer by which any bytes can be written, in the middle of a text too.

    bytes_of: of every token id, b"" for special marks.  marks: their ids by spelling.  opening: the
    marks that it puts before a text.  ends: the marks that end one, the tokenizer's own first.
    hash: see `tokenizer_hash`.
    """

    def __init__(self, pretrained: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """pretrained: a transformers tokenizer with a `tokenizers` backend.  eos_token_ids: those
        that its model's configuration declares.

        Raises ConfigError for one that changes texts, so that no bytes can be written exactly."""
        backend = getattr(pretrained, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(pretrained).__name__} has no fast tokenizer; save it as tokenizer.json"
            )
        table, added = byte_table(backend), backend.get_added_tokens_decoder()
        self.hash = tokenizer_hash(token_strings(pretrained.get_vocab()))
        self.marks = {token.content: index for index, token in added.items() if token.special}
        special = frozenset(self.marks.values())
        self.bytes_of: Sequence[bytes] = [b"" if i in special else b for i, b in enumerate(table)]
        opened = backend.encode("a")
        marked = zip(opened.ids, opened.special_tokens_mask, strict=True)
        self.opening = tuple(each for each, _ in itertools.takewhile(lambda pair: pair[1], marked))
        ends = dict.fromkeys((pretrained.eos_token_id, *eos_token_ids))
        self.ends: tuple[int, ...] = tuple(each for each in ends if each in special)
        self._backend = _unmarked(backend)
        # The lowest id of each: reversed, so that it is entered last.
        lone = [(b, i) for i, b in enumerate(self.bytes_of) if len(b) == 1]
        self._id_of_byte = {data[0]: index for data, index in reversed(lone)}
        self._check_exact()

    @classmethod
    def load(cls, folder: str | Path) -> TokenBytes:
        """The tokenizer of a Hugging Face folder; raises ConfigError if it has none of use."""
        return cls(load_pretrained_tokenizer(folder), eos_token_ids(Path(folder)))

    def encode(self, text: str) -> list[int]:
        """The tokens of a piece of text: no marks are added or read, no space put before it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def words(self, text: str) -> tuple[list[int], list[int]]:
        """The tokens of a piece of text, and which word each is of: words are cut before tokens."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        if self._backend.pre_tokenizer is not None:
            return encoding.ids, encoding.word_ids
        begins = (self.bytes_of[each].startswith(b" ") for each in encoding.ids)
        return encoding.ids, list(itertools.accumulate(begins))

    def decode(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of these tokens; ids beyond the vocabulary have none."""
        bytes_of = self.bytes_of
        return b"".join([bytes_of[each] for each in token_ids if 0 <= each < len(bytes_of)])

    def write(self, data: bytes) -> tuple[list[int], bool]:
        """The tokens of these bytes, and True if they are all of them: some vocabularies lack
        bytes, which are left out then."""
        ids: list[int] = []
        for part in _BROKEN.split(data.decode("utf-8", "surrogateescape")):
            ids += self._single(part) if _BROKEN.match(part) else self._written(part)
        return ids, self.decode(ids) == data

    def _written(self, text: str) -> list[int]:
        ids = self.encode(text)
        if self.decode(ids) == text.encode():
            return ids
        if len(text) == 1:
            return self._single(text)
        half = len(text) // 2  # what cannot be encoded is found by halving
        return self._written(text[:half]) + self._written(text[half:])

    def _single(self, text: str) -> list[int]:
        """A token for each byte, if there are some for all of them."""
        found = [self._id_of_byte.get(byte) for byte in text.encode("utf-8", "surrogateescape")]
        return [each for each in found if each is not None] if None not in found else []

    def _check_exact(self) -> None:
        """Raise ConfigError where texts change on their way into tokens."""
        normalizer = self._backend.normalizer
        for probe in _PROBES:
            normal = probe if normalizer is None else normalizer.normalize_str(probe)
            if normal.replace(_METASPACE, " ") != probe:
                raise ConfigError(f"its tokenizer reads {probe!r} as {normal!r}, another text")
        if self.decode(self.encode(_PROBES[0].lower())) != _PROBES[0].lower().encode():
            raise ConfigError("its tokenizer loses spaces between words")


def _unmarked(backend: Any) -> Any:
    """A copy that reads special marks as text, and puts no space before one."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None
    for part in (*_parts(state["normalizer"]), *_parts(state["pre_tokenizer"])):
        if "prepend_scheme" in part:
            part["prepend_scheme"] = "never"
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
        if part["type"] == "Prepend":
            part["prepend"] = ""
    copied = Tokenizer.from_str(json.dumps(state))
    copied.encode_special_tokens = True
    return copied


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A tokenizer's normalizer, pre-tokenizer or decoder, or those that it is a sequence of."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for each in part.get(key, ()):
            yield from _parts(each)
