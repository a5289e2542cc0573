"""Damage to serialised messages, as a faulty network or a hostile peer would do it."""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# How many damaged messages the tests send in all.
NUM_MUTATIONS = int(os.environ.get("DRAFTHOUSE_MUTATIONS", "200"))
# Between the first and the second half of them; if messages were kept, thousands would be more.
MAX_GROWTH_BYTES = 1024 * 1024

# What decoders trip over: lengths and counts at the edges of their types, and past them.
_EDGES = [0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def generating(count: int) -> Any:
    """Hypothesis settings: `count` examples, nothing shrunk, nothing kept."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


def damaged(valid: st.SearchStrategy[bytes], count: int) -> list[bytes]:
    """`count` damaged messages at once, for tests that send them over a wire."""
    found = []

    @generating(count)
    @given(mutated(valid))
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """A valid message with one to four changes."""
    message, other = draw(valid), draw(valid)
    for _ in range(draw(st.integers(1, 4))):
        change = draw(st.sampled_from(_CHANGES))
        message = change(draw, message, other)
    return message


def _part(draw: st.DrawFn, data: bytes) -> slice:
    first, second = sorted(draw(st.integers(0, len(data))) for _ in range(2))
    return slice(first, second)


def _flip(draw: st.DrawFn, data: bytes, _other: bytes) -> bytes:
    if not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]


def _graft(draw: st.DrawFn, data: bytes, other: bytes) -> bytes:
    """A part is replaced by one of the message, of another, or by any bytes; each may be empty."""
    source = draw(st.sampled_from([b"", data, other]) | st.binary(min_size=1, max_size=16))
    part = _part(draw, data)
    return data[: part.start] + source[_part(draw, source)] + data[part.stop :]


def _field(draw: st.DrawFn, data: bytes, _other: bytes) -> bytes:
    """One field of the message, at its top or inside, with another value, number or type."""
    fields = list(_fields(data))
    if not fields:
        return data
    start, value_at, end = draw(st.sampled_from(fields))
    tag = _varint(draw(st.integers(1, 20)) << 3 | draw(st.integers(0, 5)))
    value = draw(
        st.sampled_from(_EDGES).map(_varint)
        | st.binary(max_size=12).map(lambda raw: _varint(len(raw)) + raw)
        | st.binary(min_size=8, max_size=8)
    )
    if draw(st.booleans()):
        tag = data[start:value_at]
    inside = data[value_at:end]
    if draw(st.booleans()):
        value = _field(draw, inside, b"") if len(inside) > 4 else inside
    return data[:start] + tag + value + data[end:]


_CHANGES = [_flip, _graft, _graft, _field]


def _fields(data: bytes) -> list[tuple[int, int, int]]:
    """(start, start of the value, end) of each top-level field; stops at what is none."""
    found, at = [], 0
    while at < len(data):
        start = at
        tag, at = _read_varint(data, at)
        value_at, kind = at, tag & 7
        if kind == 0:
            _, at = _read_varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 2:
            size, at = _read_varint(data, at)
            at += size
        elif kind == 5:
            at += 4
        else:
            break
        if at > len(data):
            break
        found.append((start, value_at, at))
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128 or shift > 63:
            break
    return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
