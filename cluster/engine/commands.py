"""The commands of rank 0 to the other ranks, and their one binary form on the way.

A message is a header of fixed size (magic, length and CRC-32 of what follows) and the commands, one
after the other: a byte for the kind, then the fields in their order, numbers little-endian, strings
and arrays behind their lengths.  It is read strictly: whatever is not exactly such a message is
refused, and nothing that arrives is ever run.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from io import BytesIO
from typing import Any, get_type_hints

import numpy as np

from cluster.core import TokenArray
from cluster.engine.work import Work
from cluster.errors import ProtocolError
from cluster.records import frozen, record

_MAGIC = b"DHRANKS1"
_HEADER = struct.Struct("<8sQI")
HEADER_SIZE = _HEADER.size
# A step's prompts are megabytes: a longer length is none, and nothing is allocated for it.
_MAX_LENGTH = 1 << 30

_COUNT, _NUMBER, _HASH = (struct.Struct(f"<{kind}") for kind in "IqQ")
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
    return b"".join(
        bytes([_KINDS.index(type(each))]) + _packed(type(each), each) for each in commands
    )


def decode(body: bytes) -> list[Command]:
    """The commands of a body; raises ProtocolError for anything else."""
    stream, commands = BytesIO(body), list[Command]()
    try:
        while number := stream.read(1):
            if number[0] >= len(_KINDS):
                raise ProtocolError(f"a rank's commands hold one of the unknown kind {number[0]}")
            commands.append(_read(_KINDS[number[0]], stream))
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a rank's commands cannot be read: {error}") from error
    return commands


def _taken(stream: BytesIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ProtocolError(f"a rank's commands end {size - len(data)} bytes early")
    return data


def _number(form: struct.Struct, stream: BytesIO) -> int:
    value: int = form.unpack(_taken(stream, form.size))[0]
    return value


def _sized(data: bytes) -> bytes:
    return _COUNT.pack(len(data)) + data


def _binary(stream: BytesIO, item_size: int = 1) -> bytes:
    return _taken(stream, _number(_COUNT, stream) * item_size)


def _hash(stream: BytesIO) -> int | None:
    found = _binary(stream)
    return _HASH.unpack(found)[0] if found else None


def _put_tokens(token_ids: Any) -> bytes:
    return _COUNT.pack(len(token_ids)) + np.asarray(token_ids, _TOKEN).tobytes()


def _tokens(stream: BytesIO) -> TokenArray:
    """int32, a copy: the engine may keep it."""
    return np.frombuffer(_binary(stream, _TOKEN.itemsize), _TOKEN).astype(np.int32)


# How the values of fields travel, by their types.  All others are records of such fields.
_Form = tuple[Callable[[Any], bytes], Callable[[BytesIO], Any]]
_FORMS: dict[Any, _Form] = {
    int: (_NUMBER.pack, partial(_number, _NUMBER)),
    int | None: (lambda value: _sized(b"" if value is None else _HASH.pack(value)), _hash),
    str: (lambda text: _sized(text.encode()), lambda stream: _binary(stream).decode()),
    bytes: (_sized, _binary),
    TokenArray: (_put_tokens, _tokens),
    tuple[int, ...]: (_put_tokens, lambda stream: tuple(_tokens(stream).tolist())),
}
# They concern the leading rank alone, or are served by one rank only.
_UNTOLD = ("num_top", "adapter")


@cache
def _fields(kind: type) -> dict[str, _Form]:
    told = {name: hint for name, hint in get_type_hints(kind).items() if name not in _UNTOLD}
    return {
        name: _FORMS.get(hint) or (partial(_packed, hint), partial(_read, hint))
        for name, hint in told.items()
    }


def _packed(kind: type, value: Any) -> bytes:
    return b"".join(pack(getattr(value, name)) for name, (pack, _) in _fields(kind).items())


def _read(kind: type, stream: BytesIO) -> Any:
    return kind(**{name: read(stream) for name, (_, read) in _fields(kind).items()})
