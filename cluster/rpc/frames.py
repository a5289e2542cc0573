"""Encodes frames as bytes and decodes them: one codec per direction of each stream.

A malformed item does not affect the others: `decode` returns a frame of the good items and one
refusal per malformed item.  On the client side the refusals are part of the frame itself; on the
server side they are returned separately and sent back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError

from cluster.errors import ProtocolError, TooLargeError
from cluster.messages import Refusal

F = TypeVar("F")

MAX_FRAME_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Decoded(Generic[F]):
    """A received frame, and the refusals of its items that must be sent to the sender."""

    frame: F
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameCodec(Generic[F]):
    """Encodes and decodes one kind of frame.

    to_message, from_message: core frame <-> protobuf message.  parse: bytes to protobuf message.
    """

    name: str
    to_message: Callable[[F], Any]
    from_message: Callable[[Any], Decoded[F]]
    parse: Callable[[bytes], Any]

    def encode(self, frame: F, max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
        """Encode `frame` as one message, or as several with fewer items if it exceeds max_bytes.

        Raises TooLargeError if a single item exceeds the limit; nothing is sent then.
        """
        data: bytes = self.to_message(frame).SerializeToString()
        if len(data) <= max_bytes:
            return [data]
        halves = split(frame)
        if halves is None:
            raise TooLargeError(
                f"one item of a {self.name} has {len(data)} bytes, the limit is {max_bytes}; "
                "send a shorter prompt or raise coordinator.max_frame_bytes"
            )
        return self.encode(halves[0], max_bytes) + self.encode(halves[1], max_bytes)

    def decode(self, data: bytes) -> Decoded[F]:
        """Decode one frame; raises ProtocolError if the bytes are not a frame of this kind."""
        try:
            message = self.parse(data)
        except DecodeError as error:
            raise ProtocolError(f"{len(data)} bytes are not a {self.name}: {error}") from error
        return self.from_message(message)


def split(frame: F) -> tuple[F, F] | None:
    """Two frames that carry the items of `frame` in order; None if it has fewer than two items.

    The items are the tuple fields of the dataclass.  Scalar fields go into the second half, because
    they describe the state after the items.  All of `released` or `cancels` goes into the first
    half: a frame may end a request and open it again, and a receiver applies these first.
    """
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    first_of_all = "cancels" if hasattr(frame, "cancels") else "released"
    released: tuple[Any, ...] = getattr(frame, first_of_all, ())
    num_items = 0
    halved = bool(released)
    for field in dataclasses.fields(frame):  # type: ignore[arg-type]
        value = getattr(frame, field.name)
        if not isinstance(value, tuple):
            second[field.name] = value
            continue
        num_items += len(value)
        if field.name == first_of_all:
            continue
        # The odd item goes to each half in turn; otherwise two fields of one item would not split.
        middle = len(value) // 2 if halved else (len(value) + 1) // 2
        halved = halved != bool(len(value) % 2)
        first[field.name], second[field.name] = value[:middle], value[middle:]
    if num_items < 2:
        return None
    if released:
        alone = len(released) == num_items
        middle = len(released) // 2 if alone else len(released)
        first[first_of_all], second[first_of_all] = released[:middle], released[middle:]
    kind: Any = type(frame)
    return kind(**first), kind(**second)
