"""Codecs that follow from the fields of a dataclass and of the message that stands for it.

A field travels under its own name or under the one that `names` gives.  Scalars stay as they are,
tuples are repeated fields, mappings are maps, arrays are as in `codec_arrays`, and dataclasses are
messages by the same rules.  A field with presence that is absent reads as None where the dataclass
allows None, else as the dataclass's default; without a default the message is refused.  A property
of the dataclass may stand for a field of the message, which is then written and not read.

Both functions of a codec are written as source and compiled, as `dataclasses` does with `__init__`:
they run for every text in every step, and so they take no longer than functions written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.errors import ProtocolError
from cluster.records import frozen

# Arrays in messages.
#
# Public messages carry them as packed repeated fields, which are copied into numpy arrays;
# messages between our own processes as little-endian `bytes`, which are read in place, so such
# arrays are read-only.


S = TypeVar("S", bound=np.generic)

# Protobuf hands a repeated field to numpy in one piece, at a fixed price; shorter ones are read
# sooner element by element.  Trees and deltas are mostly this short.
_FEW = 32


class ArrayCodec(Generic[S]):
    """Arrays of numbers of one kind, of 4 bytes each."""

    def __init__(self, kind: type[S]) -> None:
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
                f"{field} has {len(data)} bytes; {self._kind.__name__}[] takes a multiple of 4"
            )
        return np.frombuffer(data, dtype=self._dtype)

    def read(self, field: Sequence[Any]) -> npt.NDArray[S]:
        """A copy of a repeated field."""
        if not field:
            return self._empty
        return np.array(field[:] if len(field) < _FEW else field, dtype=self._kind)


TOKENS = ArrayCodec(np.int32)


V = TypeVar("V")

_SCALARS = {
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_FIXED64: int,
    FieldDescriptor.TYPE_SFIXED32: int,
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_UINT32: int,
    FieldDescriptor.TYPE_UINT64: int,
}
# With the type of the repeated field that holds such an array; each can also be bytes.
_ARRAYS: dict[Any, tuple[ArrayCodec[Any], int]] = {
    np.int32: (TOKENS, FieldDescriptor.TYPE_SFIXED32),
    np.float32: (ArrayCodec(np.float32), FieldDescriptor.TYPE_FLOAT),
    np.uint32: (ArrayCodec(np.uint32), FieldDescriptor.TYPE_FIXED32),
}


@frozen
class Codec(Generic[V]):
    """Turns values of one type into one type of message, or into an enum, and back.

    kind: type of the values.  wire: full name of the message or enum.  encode: returns it, or None
    where the field that would hold it stays absent.  decode: raises ProtocolError.
    """

    kind: Any
    wire: str
    encode: Callable[[V], Any]
    decode: Callable[[Any], V]

    def read_by(self, decode: Callable[[Any], Any]) -> Codec[Any]:
        """The codec of the same values, but read by `decode`."""
        return Codec(self.kind, self.wire, self.encode, decode)


@frozen
class ByHand:
    """Turns one field of a record into fields of the message and back, where no rule does.

    names: the fields of the message that stand for it.  encode: takes the record and returns their
    values; None = they are not written.  decode: takes the message and returns the field's value.
    """

    names: tuple[str, ...]
    encode: Callable[[Any], Mapping[str, Any]] | None
    decode: Callable[[Any], Any]


def enum_codec(kind: Any, wire: Any, field: str, values: Mapping[V, int]) -> Codec[V]:
    """The codec of values that travel as the enum `wire`; field names it in the ProtocolError."""
    of_wire = {number: value for value, number in values.items()}

    def decode(number: int) -> V:
        if number not in of_wire:
            raise ProtocolError(f"{field} is {number}, which this version does not know")
        return of_wire[number]

    return Codec(kind, wire.DESCRIPTOR.full_name, values.__getitem__, decode)


def record_codec(
    kind: type[V],
    message: type[Message],
    codecs: Iterable[Codec[Any]] = (),
    *,
    names: Mapping[str, str] = {},
    by_hand: Mapping[str, ByHand] = {},
) -> Codec[V]:
    """The codec of a dataclass and a message that have the same fields.

    codecs: of parts that follow from no rule.  names, by_hand: by fields of the dataclass.
    Raises TypeError where a field of either side has no counterpart of its type.
    """
    source = _Source(codecs)
    hints = get_type_hints(kind)
    unused: dict[str, Any] = dict(message.DESCRIPTOR.fields_by_name)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if hand := by_hand.get(field.name):
            source.add_by_hand(hand)
            unused = {name: wire for name, wire in unused.items() if name not in hand.names}
            continue
        wire = unused.pop(names.get(field.name, field.name), None)
        if wire is None:
            raise TypeError(f"{message.__name__} has no field for {kind.__name__}.{field.name}")
        source.add(field, hints[field.name], wire)
    for name in unused:
        if not isinstance(getattr(kind, name, None), property):
            raise TypeError(f"{kind.__name__} has no field for {message.__name__}.{name}")
        source.writes.append(f"{name}=record.{name}")
    encode, decode = source.compiled(kind, message)
    return Codec(kind, message.DESCRIPTOR.full_name, encode, decode)


class _Source:
    """The source of a codec's two functions.  The record is `record` there, the message `sent`."""

    def __init__(self, codecs: Iterable[Codec[Any]]) -> None:
        self.writes: list[str] = []
        self._reads: list[str] = []
        self._known = {(codec.kind, codec.wire): codec for codec in codecs}
        self._values: dict[str, Any] = {}

    def add_by_hand(self, hand: ByHand) -> None:
        if hand.encode is not None:
            self.writes.append(f"**{self._name(hand.encode)}(record)")
        self._reads.append(f"{self._name(hand.decode)}(sent)")

    def add(self, field: dataclasses.Field[Any], hint: Any, wire: FieldDescriptor) -> None:
        """One field of the dataclass, and the field of the message that stands for it."""
        held = f"record.{field.name}"
        is_optional = wire.has_presence and type(None) in get_args(hint)
        if is_optional:
            (hint,) = (part for part in get_args(hint) if part is not type(None))
        write, read = self._converted(hint, wire, held)
        if is_optional:
            write = f"None if {held} is None else {write}"
        if wire.has_presence:
            absent = "None" if is_optional else f"{self._name(_default_of(field, wire.name))}()"
            read = f"{read} if sent.HasField({wire.name!r}) else {absent}"
        self.writes.append(f"{wire.name}={write}")
        self._reads.append(read)

    def compiled(
        self, kind: Any, message: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        scope = {**self._values, "kind": kind, "message": message}
        exec(
            f"def encode(record): return message({', '.join(self.writes)})\n"
            f"def decode(sent): return kind({', '.join(self._reads)})",
            scope,
        )
        return scope["encode"], scope["decode"]

    def _name(self, value: Any) -> str:
        """The name under which the source finds `value`."""
        name = f"value_{len(self._values)}"
        self._values[name] = value
        return name

    def _converted(self, hint: Any, wire: FieldDescriptor, held: str) -> tuple[str, str]:
        """The expression of what the message's field is given, and of what is read from it."""
        sent = f"sent.{wire.name}"
        origin, parts = get_origin(hint), get_args(hint)
        if origin is np.ndarray:
            array_codec, repeated = _ARRAYS.get(get_args(parts[1])[0], (None, None))
            wanted = repeated if wire.is_repeated else FieldDescriptor.TYPE_BYTES
            if array_codec is None or wire.type != wanted:
                raise TypeError(f"{wire.full_name} holds no {hint}")
            array = self._name(array_codec)
            if wire.is_repeated:
                return f"{held}.tolist()", f"{array}.read({sent})"
            return f"{array}.pack({held})", f"{array}.unpack({sent}, {wire.name!r})"
        if not wire.is_repeated:
            encode, decode = self._item(hint, wire)
            return f"{encode}({held})", f"{decode}({sent})"  # without a function `(x)`, which is x
        if origin is tuple and parts[1:] == (...,):
            encode, decode = self._item(parts[0], wire)
            if encode:
                return f"map({encode}, {held})", f"tuple(map({decode}, {sent}))"
            return held, f"tuple({sent})"
        entry = wire.message_type
        if origin is not Mapping or entry is None or not entry.GetOptions().map_entry:
            raise TypeError(f"{wire.full_name} is repeated and holds no {hint}")
        self._item(parts[0], entry.fields_by_name["key"])
        encode, decode = self._item(parts[1], entry.fields_by_name["value"])
        return (
            f"{{key: {encode}(value) for key, value in {held}.items()}}",
            f"{{key: {decode}(value) for key, value in {sent}.items()}}",
        )

    def _item(self, hint: Any, wire: FieldDescriptor) -> tuple[str, str]:
        """The names of the functions that convert one value; empty where it stays as it is."""
        part = wire.message_type or wire.enum_type
        if part is None:
            if _SCALARS.get(wire.type) is not hint:
                raise TypeError(f"{wire.full_name} holds no {hint}")
            return "", ""
        codec = self._known.get((hint, part.full_name))
        if codec is None:
            if wire.message_type is None or not dataclasses.is_dataclass(hint):
                raise TypeError(f"{wire.full_name} is a {part.full_name} and holds no {hint}")
            codec = record_codec(hint, GetMessageClass(part), self._known.values())  # type: ignore[arg-type]
        return self._name(codec.encode), self._name(codec.decode)


def _default_of(field: dataclasses.Field[Any], name: str) -> Callable[[], Any]:
    """Returns the dataclass's default of the field; where there is none, raises ProtocolError."""

    def default() -> Any:
        if field.default is not MISSING:
            return field.default
        if field.default_factory is not MISSING:
            return field.default_factory()
        raise ProtocolError(f"{name} is absent")

    return default
