"""What ranks are told survives the way, and anything else is refused."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_TREE, TokenTree, token_array
from cluster.engine import commands
from cluster.engine.commands import (
    HEADER_SIZE,
    Command,
    ForgetPrefixes,
    Release,
    Retain,
    RunStep,
    Stop,
    Submit,
    body_length,
    check_body,
    decode,
    encode,
    header_of,
)
from cluster.engine.work import Work
from cluster.errors import ProtocolError

WORK = Work(
    "naïve",
    7,
    token_array([5, 0, 2**31 - 1]),
    TokenTree.of([3, -4, 9], [-1, 0, 5]),
    2,
    2**64 - 1,
    b"\x00\xffwhose",
)
COMMANDS: list[Command] = [
    Submit(WORK),
    Submit(Work("", 0, token_array([]), EMPTY_TREE)),
    Submit(Work("zero", 0, token_array([1]), prefix_hash=0)),
    Retain("a", (0, 2), (3, 2**31 - 1)),
    Retain("b", (), ()),
    Release("c"),
    ForgetPrefixes(),
    RunStep(40),
    Stop(),
]

texts = st.text(max_size=8)
token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(token_array)
works = st.builds(
    Work,
    texts,
    st.integers(0, 2**40),
    token_ids,
    st.builds(TokenTree, token_ids, token_ids),
    st.integers(0, 9),
    st.none() | st.integers(0, 2**64 - 1),
    st.binary(max_size=16),
)
nodes = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
any_command = st.one_of(
    st.builds(Submit, works),
    st.builds(Retain, texts, nodes, nodes),
    st.builds(Release, texts),
    st.sampled_from([ForgetPrefixes(), RunStep(40), Stop()]),
)


# No other rank computes or refuses anything on their account (`limits.unserved`).
ASKED_OF_THE_LEADER = {"num_top", "adapter"}


def plain(command: Command) -> object:
    """A command as something that can be compared: arrays as lists with their dtype."""
    if not isinstance(command, Submit):
        return command
    found = {}
    for field in dataclasses.fields(Work):
        value = getattr(command.work, field.name)
        arrays = (value.token_ids, value.parents) if isinstance(value, TokenTree) else (value,)
        found[field.name] = [
            (each.dtype, each.tolist()) if isinstance(each, np.ndarray) else each for each in arrays
        ]
    return found


def test_every_kind_of_command_is_among_those_that_are_tested() -> None:
    assert {type(command) for command in COMMANDS} == set(commands.Command.__args__)
    # A new field of a work must travel too: give it a value here that is not its default.
    defaults = Work("", 0, token_array([]))
    for field in dataclasses.fields(Work):
        if field.name in ASKED_OF_THE_LEADER:
            continue
        assert getattr(WORK, field.name) is not getattr(defaults, field.name), field.name


@given(st.lists(any_command, max_size=6))
def test_commands_survive_the_way(given_commands: list[Command]) -> None:
    found = decode(encode([*COMMANDS, *given_commands]))
    assert list(map(plain, found)) == list(map(plain, [*COMMANDS, *given_commands]))


def test_what_arrives_may_be_kept_and_written_to() -> None:
    (found,) = decode(encode([Submit(WORK)]))
    assert isinstance(found, Submit)
    assert found.work.delta.flags.writeable


@given(st.lists(any_command, max_size=3), st.data())
def test_a_changed_message_is_refused(given_commands: list[Command], data: st.DataObject) -> None:
    body = encode([*given_commands, RunStep(40)])
    message = bytearray(header_of(body) + body)
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    header, changed = bytes(message[:HEADER_SIZE]), bytes(message[HEADER_SIZE:])

    def receive() -> None:
        check_body(header, changed[: body_length(header)])

    with pytest.raises(ProtocolError):
        receive()


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_commands_or_refused(body: bytes) -> None:
    try:
        found = decode(body)
    except ProtocolError:
        return
    assert list(map(plain, decode(encode(found)))) == list(map(plain, found))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x09", "unknown kind 9"),
        (b"\x02" + struct.pack("<I", 100) + b"short", "end 95 bytes early"),
        (b"\x02" + struct.pack("<I", 2) + b"\xff\xfe", "cannot be read"),
        (encode([Submit(WORK)])[:-1], "end 1 bytes early"),
        (b"\x80\x04\x95\x10", "unknown kind 128"),  # a pickle's beginning
    ],
)
def test_a_garbled_body_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(body)


def test_a_length_that_cannot_be_one_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ProtocolError, match="no header"):
        body_length(struct.pack("<8sQI", b"DHRANKS1", 2**60, 0))
