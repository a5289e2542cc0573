"""What ranks are told survives the way, and anything else is refused."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import TokenTree, token_array
from cluster.engine.engine import Engine
from cluster.engine.parallel import CALLS, Call, decode, encode
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
SAID = [
    ("submit", [WORK]),
    ("retain", ["a", tuple(np.arange(2)), np.arange(2)]),
    ("release", ["c"]),
    ("forget_prefixes", []),
    ("capture_ahead", [[1, -1]]),
    ("step", [[1, -1], 40]),
    ("close", []),
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
nodes = st.lists(st.integers(0, 2**31 - 1), max_size=4)
any_call = st.one_of(
    st.tuples(st.just("submit"), works.map(lambda work: [work])),
    st.tuples(st.sampled_from(CALLS[1:]), st.lists(texts | nodes, max_size=3)),
)


# No other rank computes or refuses anything on their account (`EngineLimits.refusal`).
ASKED_OF_THE_LEADER = {"num_top", "adapter"}


def test_every_call_is_one_of_the_engine_and_among_those_that_are_tested():
    assert {name for name, _ in SAID} == set(CALLS)
    assert all(callable(getattr(Engine, name)) for name in CALLS)


def test_a_work_arrives_as_it_was_sent():
    ((name, (work,)),) = decode(encode(SAID[:1]))
    assert name == "submit"
    # A new field of a work must travel too: give it a value above that is not its default.
    defaults = Work("", 0, token_array([]))
    for field in {each.name for each in dataclasses.fields(Work)} - ASKED_OF_THE_LEADER:
        sent, found, default = (getattr(each, field) for each in (WORK, work, defaults))
        assert sent is not default, field
        parts = [(found, sent)]
        if isinstance(sent, TokenTree):
            parts = [(found.token_ids, sent.token_ids), (found.parents, sent.parents)]
        for one, other in parts:
            assert np.array_equal(one, other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    assert work.delta.flags.writeable  # it may be kept


@given(st.lists(any_call, max_size=6))
def test_calls_survive_the_way(given_calls: list[Call]):
    body = encode([*SAID, *given_calls])
    assert encode(decode(body)) == body


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_calls_or_refused(body: bytes):
    try:
        said = encode(decode(body))
    except ProtocolError:
        return
    assert encode(decode(said)) == said


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (json.dumps([["eval", ["1"]]]).encode(), "unknown kind 'eval'"),
        (json.dumps([["submit", []]]).encode(), "cannot be read"),
        (json.dumps([["submit", [["a", 0, [2**40], [[], []], 0, None, ""]]]]).encode(), "be read"),
        (encode([SAID[0]])[:-1], "cannot be read"),
        (b"\x80\x04\x95\x10", "cannot be read"),  # a pickle's beginning
    ],
)
def test_a_garbled_body_is_refused_with_its_reason(body: bytes, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        decode(body)
