"""Frames to bytes and back: one codec per direction of each stream.

A malformed item costs that item only: `decode` returns the frame of the good ones and a refusal
for each of the others.  Where the receiving side is the one that asked, the refusal stands in the
frame itself; where it is the one that answers, it is sent back.
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
    """A received frame, and the items of it that must be refused to the sender."""

    frame: F
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class FrameCodec(Generic[F]):
    """How one kind of frame travels.

    to_message, from_message: core frame <-> protobuf message.  parse: bytes to protobuf message.
    """

    name: str
    to_message: Callable[[F], Any]
    from_message: Callable[[Any], Decoded[F]]
    parse: Callable[[bytes], Any]

    def encode(self, frame: F, max_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
        """`frame` as one or, where it exceeds max_bytes, several frames of fewer items.

        Raises TooLargeError, with nothing sent, when a single item exceeds the limit.
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
        """Raises ProtocolError when the bytes are no frame of this kind at all."""
        try:
            message = self.parse(data)
        except DecodeError as error:
            raise ProtocolError(f"{len(data)} bytes are not a {self.name}: {error}") from error
        return self.from_message(message)


def split(frame: F) -> tuple[F, F] | None:
    """Two frames that together say what `frame` says, in order; None for at most one item.

    The items are the tuple fields of the dataclass.  Scalar fields go with the second half: they
    tell the state after the items; but `is_apart`, which parts them from what came before, with the
    first.  All of `released` goes first, as the receiver of one frame
    takes it: a frame may release a request and open it anew.
    """
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    released: tuple[str, ...] = getattr(frame, "released", ())
    num_items = 0
    halved = bool(released)
    for field in dataclasses.fields(frame):  # type: ignore[arg-type]
        value = getattr(frame, field.name)
        if not isinstance(value, tuple):
            half = first if field.name == "is_apart" else second
            half[field.name] = value
            continue
        num_items += len(value)
        if field.name == "released":
            continue
        # Odd items alternate between the halves, or two fields of one item each would not split.
        middle = len(value) // 2 if halved else (len(value) + 1) // 2
        halved = halved != bool(len(value) % 2)
        first[field.name], second[field.name] = value[:middle], value[middle:]
    if num_items < 2:
        return None
    if released:
        alone = len(released) == num_items
        middle = len(released) // 2 if alone else len(released)
        first["released"], second["released"] = released[:middle], released[middle:]
    kind: Any = type(frame)
    return kind(**first), kind(**second)
