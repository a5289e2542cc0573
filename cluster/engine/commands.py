"""The commands of rank 0 to the other ranks, and their one binary form on the way.

A message is a header of fixed size (magic, length and CRC-32 of what follows) and the commands, one
after the other: a byte for the kind, then the fields in their order, numbers little-endian, strings
and arrays behind their lengths.  It is read strictly: whatever is not exactly such a message is
refused, and nothing that arrives is ever run.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.engine.work import Work
from cluster.errors import ProtocolError
from cluster.records import frozen, record

_MAGIC = b"DHRANKS1"
_HEADER = struct.Struct("<8sQI")
HEADER_SIZE = _HEADER.size
# A step's prompts are megabytes: a longer length is none, and nothing is allocated for it.
_MAX_LENGTH = 1 << 30

_BYTE, _COUNT, _NUMBER, _HASH = (struct.Struct(f"<{kind}") for kind in "BIqQ")
_TOKEN = np.dtype("<i4")


@record
class Submit:
    work: Work


@frozen
class Retain:
    request_id: str
    path: tuple[int, ...]
    keep: tuple[int, ...]


@frozen
class Release:
    request_id: str


@frozen
class ForgetPrefixes:
    pass


@frozen
class RunStep:
    """prompt_rows: see `Engine.step`."""

    prompt_rows: int


@frozen
class Stop:
    pass


Command = Submit | Retain | Release | ForgetPrefixes | RunStep | Stop

_KINDS: tuple[type[Command], ...] = (Submit, Retain, Release, ForgetPrefixes, RunStep, Stop)


def header_of(body: bytes) -> bytes:
    """The header that goes before `body`."""
    if len(body) > _MAX_LENGTH:
        raise ProtocolError(f"the ranks' commands take {len(body)} bytes, at most {_MAX_LENGTH}")
    return _HEADER.pack(_MAGIC, len(body), zlib.crc32(body))


def body_length(header: bytes) -> int:
    """The number of bytes behind a header; raises ProtocolError where this is none."""
    magic, length, _ = _HEADER.unpack(header)
    if magic != _MAGIC or length > _MAX_LENGTH:
        raise ProtocolError(
            f"no header of a rank's commands: {header[:16]!r}; run one version on all ranks"
        )
    return int(length)


def check_body(header: bytes, body: bytes) -> None:
    """Raise ProtocolError unless the body is the one that the header was made for."""
    _, length, checksum = _HEADER.unpack(header)
    if len(body) != length or zlib.crc32(body) != checksum:
        raise ProtocolError(f"a rank's commands of {len(body)} bytes were changed on their way")


def encode(commands: Sequence[Command]) -> bytes:
    """The body of a message."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(_BYTE.pack(_KINDS.index(type(command))))
        match command:
            case Submit(work):
                _put_work(parts, work)
            case Retain(request_id, path, keep):
                _put_text(parts, request_id)
                _put_tokens(parts, np.asarray(path, _TOKEN))
                _put_tokens(parts, np.asarray(keep, _TOKEN))
            case Release(request_id):
                _put_text(parts, request_id)
            case RunStep(prompt_rows):
                parts.append(_COUNT.pack(prompt_rows))
    return b"".join(parts)


def decode(body: bytes) -> list[Command]:
    """The commands of a body; raises ProtocolError for anything else."""
    reader = _Reader(body)
    commands: list[Command] = []
    try:
        while not reader.is_at_end:
            commands.append(_command(reader))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"a rank's commands cannot be read: {error}") from error
    return commands


def _command(reader: _Reader) -> Command:
    number = reader.number(_BYTE)
    if number >= len(_KINDS):
        raise ProtocolError(f"a rank's commands hold one of the unknown kind {number}")
    kind = _KINDS[number]
    if kind is Submit:
        return Submit(_work(reader))
    if kind is Retain:
        text, path, keep = reader.text(), reader.tokens(), reader.tokens()
        return Retain(text, tuple(path.tolist()), tuple(keep.tolist()))
    if kind is Release:
        return Release(reader.text())
    if kind is ForgetPrefixes:
        return ForgetPrefixes()
    return RunStep(reader.number(_COUNT)) if kind is RunStep else Stop()


def _put_work(parts: list[bytes], work: Work) -> None:
    # num_top concerns the leading rank alone, and adapters are served by one rank only.
    _put_text(parts, work.request_id)
    parts += (_NUMBER.pack(work.base_len), _NUMBER.pack(work.num_cached_nodes))
    for tokens in (work.delta, work.tree.token_ids, work.tree.parents):
        _put_tokens(parts, tokens)
    _put_bytes(parts, work.tenant)
    parts.append(_BYTE.pack(work.prefix_hash is not None))
    parts.append(_HASH.pack(work.prefix_hash or 0))


def _work(reader: _Reader) -> Work:
    request_id = reader.text()
    base_len, num_cached_nodes = reader.number(_NUMBER), reader.number(_NUMBER)
    delta, token_ids, parents = reader.tokens(), reader.tokens(), reader.tokens()
    tenant = reader.binary()
    is_checked, prefix_hash = reader.number(_BYTE), reader.number(_HASH)
    return Work(
        request_id,
        base_len,
        delta,
        TokenTree(token_ids, parents),
        num_cached_nodes,
        prefix_hash if is_checked else None,
        tenant,
    )


def _put_text(parts: list[bytes], text: str) -> None:
    _put_bytes(parts, text.encode())


def _put_bytes(parts: list[bytes], data: bytes) -> None:
    parts += (_COUNT.pack(len(data)), data)


def _put_tokens(parts: list[bytes], tokens: TokenArray) -> None:
    parts += (_COUNT.pack(len(tokens)), tokens.astype(_TOKEN, copy=False).tobytes())


class _Reader:
    """Takes a body apart from its beginning."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._body)

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self._body, self._at)[0]
        self._at += form.size
        return value

    def text(self) -> str:
        return self.binary().decode()

    def binary(self) -> bytes:
        return self._taken(self.number(_COUNT))

    def tokens(self) -> TokenArray:
        """int32, a copy: the engine may keep it."""
        taken = self._taken(self.number(_COUNT) * _TOKEN.itemsize)
        return np.frombuffer(taken, _TOKEN).astype(np.int32)

    def _taken(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._body):
            raise ProtocolError(f"a rank's commands end {self._at - len(self._body)} bytes early")
        return self._body[start : self._at]
