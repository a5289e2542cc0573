"""Encodes frames as bytes and decodes them: one codec per direction of each stream.

A malformed item does not affect the others: `decode` returns a frame of the good items and one
refusal per malformed item.  On the client side the refusals are part of the frame itself; on the
server side they are returned separately and sent back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from cluster.errors import ProtocolError, TooLargeError
from cluster.rpc.codec_records import Codec, record_codec
from cluster.rpc.messages import Refusal

F = TypeVar("F")
V = TypeVar("V")

MAX_FRAME_BYTES = 4 * 1024 * 1024


class FrameCodec(Generic[F]):
    """Encodes and decodes one kind of frame, as `record_codec` does it.

    An item whose codec reads it as a Refusal is refused, and one that reads as None is left out.
    """

    def __init__(self, kind: type[F], message: type[Message], codecs: Iterable[Codec[Any]]) -> None:
        self.name = kind.__name__
        self._codec = record_codec(kind, message, codecs)
        self._parse = message.FromString
        hints = get_type_hints(kind)
        self._has_refusals = "refusals" in hints
        self._items = [
            name for name, hint in hints.items() if get_origin(hint) is tuple and name != "refusals"
        ]

    def encode(self, frame: F, max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
        """Encode `frame` as one message, or as several with fewer items if it exceeds max_bytes.

        Raises TooLargeError if a single item exceeds the limit; nothing is sent then.
        """
        data: bytes = self._codec.encode(frame).SerializeToString()
        if len(data) <= max_bytes:
            return [data]
        halves = split(frame)
        if halves is None:
            raise TooLargeError(
                f"one item of a {self.name} has {len(data)} bytes, the limit is {max_bytes}; "
                "send a shorter prompt or raise coordinator.max_frame_bytes",
                param="prompt",
            )
        return self.encode(halves[0], max_bytes) + self.encode(halves[1], max_bytes)

    def decode(self, data: bytes) -> tuple[F, list[Refusal]]:
        """Return a received frame, and the refusals of its items that must be sent to the sender.

        Raises ProtocolError if the bytes are not a frame of this kind."""
        try:
            message = self._parse(data)
        except DecodeError as error:
            raise ProtocolError(f"{len(data)} bytes are not a {self.name}: {error}") from error
        whole: Any = self._codec.decode(message)
        refusals: list[Refusal] = []
        sound: dict[str, tuple[Any, ...]] = {}
        for name in self._items:
            items = getattr(whole, name)
            refusals += (item for item in items if isinstance(item, Refusal))
            sound[name] = tuple(item for item in items if not isinstance(item, Refusal | None))
        if self._has_refusals:
            return replace(whole, **sound, refusals=(*whole.refusals, *refusals)), []
        return replace(whole, **sound), refusals


def refusing(codec: Codec[V]) -> Codec[Any]:
    """The codec of a frame's items: one that cannot be decoded reads as its refusal."""

    def decode_or_refuse(message: Any) -> V | Refusal:
        try:
            return codec.decode(message)
        except ProtocolError as error:
            return Refusal(message.request_id, message.generation, error.code, error.message)

    return codec.read_by(decode_or_refuse)


# Receivers apply these before all others: a frame may end a request and open it again.
_FIRST = ("cancels", "released")


def split(frame: F) -> tuple[F, F] | None:
    """Two frames that carry the items of `frame` in order; None if it has fewer than two items.

    The items are the tuple fields of the dataclass.  Scalar fields go into the second half, because
    they describe the state after the items.
    """
    fields = [each.name for each in dataclasses.fields(frame)]  # type: ignore[arg-type]
    names = sorted(fields, key=lambda name: name not in _FIRST)
    tuples = [name for name in names if isinstance(getattr(frame, name), tuple)]
    items = [(name, item) for name in tuples for item in getattr(frame, name)]
    if len(items) < 2:
        return None
    middle = len(items) // 2
    first, second = (
        {name: tuple(item for of, item in half if of == name) for name in tuples}
        for half in (items[:middle], items[middle:])
    )
    whole: Any = frame
    return type(frame)(**first), replace(whole, **second)
