"""Arrays in messages.

Public messages carry them as packed repeated fields, which are copied into numpy arrays; messages
between our own processes as little-endian `bytes`, which are read in place, so such arrays are
read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_TREE, TokenArray, TokenTree
from cluster.errors import ProtocolError

S = TypeVar("S", bound=np.generic)

# Protobuf hands a repeated field to numpy in one piece, at a fixed price; shorter ones are read
# sooner element by element.  Trees and deltas are mostly this short.
_FEW = 32


class ArrayCodec(Generic[S]):
    """Arrays of numbers of one kind, of 4 bytes each."""

    def __init__(self, name: str, kind: type[S]) -> None:
        self._name = name
        self._kind = kind
        self._dtype = np.dtype(kind).newbyteorder("<")
        self._empty: npt.NDArray[S] = np.empty(0, dtype=kind)
        self._empty.setflags(write=False)

    def pack(self, array: npt.NDArray[S]) -> bytes:
        return array.astype(self._dtype, copy=False).tobytes()

    def unpack(self, data: bytes, field: str) -> npt.NDArray[S]:
        """A read-only view of `data`; field names it in the ProtocolError."""
        if not data:
            return self._empty
        if len(data) % 4:
            raise ProtocolError(
                f"{field} has {len(data)} bytes; {self._name}[] takes a multiple of 4"
            )
        return np.frombuffer(data, dtype=self._dtype)

    def read(self, field: Sequence[Any]) -> npt.NDArray[S]:
        """A copy of a repeated field."""
        if not field:
            return self._empty
        return np.array(field[:] if len(field) < _FEW else field, dtype=self._kind)


TOKENS = ArrayCodec("i32", np.int32)
FLOATS = ArrayCodec("f32", np.float32)
BITS = ArrayCodec("u32", np.uint32)


def make_tree(token_ids: TokenArray, parents: TokenArray) -> TokenTree:
    """The tree as it was sent: `spec.tree_check` is to look at it next."""
    return TokenTree(token_ids, parents) if len(token_ids) or len(parents) else EMPTY_TREE
