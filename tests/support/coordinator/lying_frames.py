"""Frames of a coordinator that lies, for the tests of what they cost the others: nothing."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from cluster.core import SamplingParams, TokenTree
from cluster.rpc.messages import Heartbeat, Open, PoolTree, StepFrame, TextName
from cluster.spec.token_log import prefix_hash
from tests.support.coordinator.toys import VOCAB_SIZE
from tests.support.rpc import frames_strategy as frames

# Of its own texts, and of those that honest coordinators run.
NAMES = ("r", "1/r", "", *"abcdefgh")
_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
_ANY_TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
_FLOATS = st.floats(width=32)
_GENERATIONS = st.integers(0, 3) | st.sampled_from([2**31, 2**64 - 1])
_LENGTHS = st.integers(0, 40) | st.sampled_from([2**31, 2**32 - 1])
_NAMES = st.sampled_from(NAMES)


def _seldom(usual: st.SearchStrategy[Any], lie: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Where much is wrong, nobody looks at the rest."""
    return st.integers(0, 7).flatmap(lambda die: usual if die else lie)


def _params() -> st.SearchStrategy[SamplingParams]:
    sound = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 9),
        max_tokens=st.integers(1, 400),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE), max_size=2).map(tuple),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        logprobs=st.sampled_from([None, 2]),
    )
    forced = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 9),
        forced_ids=st.lists(st.integers(-1, VOCAB_SIZE), min_size=1, max_size=9).map(tuple),
        logprobs=st.sampled_from([None, 0]),
    )
    return st.one_of(sound, sound, sound, frames.of(SamplingParams), forced)


@st.composite
def _opens(draw: st.DrawFn) -> Open:
    tokens = np.array(draw(_seldom(_TOKENS, _ANY_TOKENS)), np.int32)
    return Open(
        draw(_NAMES),
        draw(_GENERATIONS),
        tokens,
        draw(_seldom(st.just(prefix_hash(tokens)), st.integers(0, 2**64 - 1))),
        draw(_seldom(st.just(len(tokens)), _LENGTHS)),
        draw(_params()),
        draw(_seldom(st.integers(10, 400), _LENGTHS)),
        "t",
        b"x",
        draw(_seldom(st.just(""), st.sampled_from(["sql@1", "none"]))),
        draw(_seldom(st.just(("a",)), st.sampled_from([("a", "a"), ("b",) * 40]))),
        draw(_seldom(st.integers(0, 16), _LENGTHS)),
    )


def _crowd() -> list[Open]:
    """More sound texts than may run of one coordinator, which go on for a while."""
    tokens, params = np.array([1, 2, 3], np.int32), SamplingParams(temperature=0.0, max_tokens=40)
    head = prefix_hash(tokens)
    return [Open(name, 0, tokens, head, 3, params, 400, drafters=("a",)) for name in NAMES[3:]]


@st.composite
def _trees(draw: st.DrawFn, opened: Open | None = None) -> PoolTree:
    """Of a text that is opened, of [1, 2, 3], which honest coordinators run too, or of any."""
    size = draw(st.integers(0, 9) | st.just(200))
    context = draw(st.just([1, 2, 3]) | _TOKENS)
    ids = draw(st.lists(st.integers(-1, VOCAB_SIZE), min_size=size, max_size=size))
    parents = draw(
        st.just(list(range(-1, size - 1)))
        | st.lists(st.integers(-2, size + 1), min_size=size, max_size=size)
    )
    num_values = draw(_seldom(st.just(size), st.integers(0, 9)))
    name, generation = draw(_NAMES), draw(_GENERATIONS)
    if opened is not None:
        context = opened.token_ids.tolist()
        name, generation = opened.request_id, opened.generation
    return PoolTree(
        name,
        generation,
        draw(_seldom(st.just(len(context)), _LENGTHS)),
        draw(_seldom(st.just(prefix_hash(context)), st.just(7))),
        TokenTree(np.array(ids, np.int32), np.array(parents, np.int32)),
        np.full(num_values, draw(_seldom(st.just(0.5), _FLOATS)), np.float32),
        np.full(draw(_seldom(st.just(size), st.integers(0, 9))), 2**32 - 1, np.uint32),
    )


def _names() -> st.SearchStrategy[tuple[TextName, ...]]:
    return st.lists(st.builds(TextName, _NAMES, _GENERATIONS), max_size=3).map(tuple)


@st.composite
def lying_frames(draw: st.DrawFn) -> StepFrame:
    """Of any content that the wire can carry; most are wrong in few things."""
    several = st.lists(_opens(), min_size=4, max_size=8)
    opens = draw(st.lists(_opens(), max_size=2) | several | st.just(_crowd()))
    trees = [draw(_trees(opened)) for opened in opens if draw(st.booleans())]
    beats = st.builds(Heartbeat, _names(), st.integers(0, 2**63))
    return StepFrame(
        tuple(opens),
        draw(_names()),
        (*trees, *draw(st.lists(_trees(), max_size=2))),
        draw(st.integers(0, 2**63)),
        draw(st.integers(0, 2**63)),
        draw(_seldom(st.none(), beats)),
    )
