"""The calls on rank 0's engine that the other ranks repeat, and their form on the way.

A message is a header of fixed size (magic, length and CRC-32 of what follows) and the calls as
JSON: of each its name and its arguments.  Nothing that arrives is run but a call of these names.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from cluster.core import TokenTree, token_array
from cluster.engine.work import Work
from cluster.errors import ProtocolError

_MAGIC = b"DHRANKS2"
_HEADER = struct.Struct("<8sQI")
HEADER_SIZE = _HEADER.size
# A step's prompts are megabytes: a longer length is none, and nothing is allocated for it.
_MAX_LENGTH = 1 << 30

# Methods of the engine; the last one ends the others' work.
CALLS = ("submit", "retain", "release", "forget_prefixes", "capture_ahead", "step", "close")
# Of a work, what concerns the leading rank alone, or is served by one rank only.
_UNTOLD = ("num_top", "adapter")

# One of CALLS, and its arguments.
Call = tuple[str, Sequence[Any]]


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


def encode(calls: Sequence[Call]) -> bytes:
    """The body of a message."""
    return json.dumps(calls, default=_plain).encode()


def _plain(value: Any) -> Any:
    """A work, and what it consists of."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    return [getattr(value, each.name) for each in fields(value) if each.name not in _UNTOLD]


def decode(body: bytes) -> list[Call]:
    """The calls of a body; raises ProtocolError for anything else."""
    try:
        return [(name, _arguments(name, given)) for name, given in json.loads(body)]
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"a rank's commands cannot be read: {error}") from error


def _arguments(name: str, given: Sequence[Any]) -> Sequence[Any]:
    if name not in CALLS:
        raise ProtocolError(f"a rank's commands hold one of the unknown kind {name!r}")
    if name != "submit":
        return given
    request_id, base_len, delta, tree, num_cached_nodes, prefix_hash, tenant = given[0]
    token_ids, parents = map(token_array, tree)
    return [
        Work(
            request_id,
            base_len,
            token_array(delta),
            TokenTree(token_ids, parents),
            num_cached_nodes,
            prefix_hash,
            bytes.fromhex(tenant),
        )
    ]
