"""Hypothesis strategies for the nouns of the wire, by their types; and structural equality."""

import dataclasses
import enum
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from cluster import core
from cluster.requests.fields import BeamSpec, DraftStep
from cluster.rpc import conversations as talk
from cluster.rpc import messages
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree import monotone
from tests.support.spec.trees import token_trees

_MAX32 = 2**31 - 1

# UTF-8 has no surrogates, and protobuf refuses them.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
lengths = st.integers(0, _MAX32)
hashes = st.integers(0, 2**64 - 1)
doubles = st.floats(allow_nan=False)
singles = st.floats(allow_nan=False, allow_infinity=False, width=32)
# Fields of 64 bits.
_WIDE = ("generation", "prefix_hash", "seed", "serial", "acknowledged")
# Fields with tests of their own, or that do not travel.
_LEFT_OUT = ("beams", "laws")


def tokens(min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[core.TokenArray]:
    return st.lists(lengths, min_size=min_size, max_size=max_size).map(core.token_array)


def trees() -> st.SearchStrategy[core.TokenTree]:
    """Well-formed ones: others do not survive the wire, nor should they."""
    return token_trees(vocab_size=_MAX32, max_nodes=10)


def survivals(tree: core.TokenTree) -> st.SearchStrategy[core.FloatArray]:
    values = st.lists(st.floats(0.0, 1.0, width=32), min_size=len(tree), max_size=len(tree))
    return values.map(lambda numbers: monotone(tree.parents, np.array(numbers, np.float32)))


def sources(size: int) -> st.SearchStrategy[npt.NDArray[np.uint32]]:
    bits = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    return bits.map(lambda numbers: np.array(numbers, np.uint32))


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=2).map(tuple)


def of(kind: type[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a dataclass; given: of fields that follow from more than their types."""
    hints = get_type_hints(kind)
    fields = {
        each.name: of_type(hints[each.name], each.name)
        for each in dataclasses.fields(kind)
        if each.name not in (*_LEFT_OUT, *given)
    }
    return st.builds(kind, **fields, **given)


def of_type(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is int and name in _WIDE:
        return hashes
    if hint in _KNOWN:
        return _KNOWN[hint]
    if origin in (Union, UnionType):
        return st.one_of(*(of_type(each, name) for each in parts))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple and parts[1:] == (...,):
        return several(of_type(parts[0]))
    if origin is tuple:
        return st.tuples(*map(of_type, parts))
    if origin is Mapping:
        return st.dictionaries(of_type(parts[0]), of_type(parts[1]), max_size=3)
    return st.sampled_from(hint) if issubclass(hint, enum.Enum) else of(hint)


def _logprobs(size: int) -> st.SearchStrategy[tuple[core.TokenLogprob, ...]]:
    own = st.lists(_KNOWN[core.TokenLogprob], min_size=size, max_size=size).map(tuple)
    return st.just(()) | own if size else st.just(())


def _pool_trees(tree: core.TokenTree) -> st.SearchStrategy[messages.PoolTree]:
    of_tree = {"survival": survivals(tree), "sources": sources(len(tree))}
    return of(messages.PoolTree, tree=st.just(tree), **of_tree)


def _draft_steps(tree: core.TokenTree) -> st.SearchStrategy[DraftStep]:
    path = st.lists(st.integers(0, len(tree) - 1), max_size=3) if len(tree) else st.just([])
    return of(
        DraftStep,
        token_ids=st.just(tree.token_ids),
        parents=st.just(tree.parents),
        survival=survivals(tree),
        sources=sources(len(tree)),
        path=path.map(core.token_array),
    )


def _verdicts(size: int) -> st.SearchStrategy[messages.TextVerdict]:
    return of(
        messages.TextVerdict,
        token_ids=tokens(size, size),
        sources=sources(max(size - 1, 0)),
        logprobs=_logprobs(size),
    )


def _events(token_ids: core.TokenArray) -> st.SearchStrategy[core.TokenEvent]:
    size = len(token_ids)
    return of(
        core.TokenEvent,
        token_ids=st.just(token_ids),
        logprobs=_logprobs(size),
        draft_sources=st.just(()) | st.tuples(*[several(texts)] * size),
    )


_KNOWN = {
    int: lengths,
    float: doubles,
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=16),
    NoneType: st.none(),
    core.TokenArray: tokens(),
}
_KNOWN[core.TokenLogprob] = of(
    core.TokenLogprob, logprob=singles, top=several(st.tuples(lengths, singles))
)
_KNOWN[core.SamplingParams] = of(core.SamplingParams, seed=hashes, beams=st.none() | of(BeamSpec))
_KNOWN[DraftStep] = trees().flatmap(_draft_steps)
_KNOWN |= {
    messages.Open: of(messages.Open, token_ids=tokens(1)),
    messages.PoolTree: trees().flatmap(_pool_trees),
    messages.TextVerdict: st.integers(0, 6).flatmap(_verdicts),
    core.Proposal: trees().flatmap(
        lambda tree: of(core.Proposal, tree=st.just(tree), survival=survivals(tree))
    ),
    core.Request: of(core.Request, prompt_ids=tokens(1)),
    core.TokenEvent: tokens().flatmap(_events),
}
# Every kind of frame, with its codec.
FRAMES = {
    "steps": (talk.STEPS, of(messages.StepFrame)),
    "verdict": (talk.VERDICT, of(messages.VerdictFrame)),
    "commit": (talk.COMMIT, of(messages.CommitFrame)),
    "proposal": (talk.PROPOSAL, of(messages.ProposalFrame)),
    "submit": (talk.SUBMIT, of(messages.SubmitFrame)),
    "event": (talk.EVENT, of(messages.EventFrame)),
}


def text(name: str, length: int = 2) -> messages.Open:
    """A text to open."""
    tokens = core.token_array(range(length))
    return messages.Open(name, 1, tokens, prefix_hash(tokens), 1, core.SamplingParams(seed=1), 99)


def same(left: Any, right: Any) -> bool:
    """Equal in every field, arrays by value and dtype."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right)
        )
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, field.name), getattr(right, field.name))
            for field in dataclasses.fields(left)
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)
