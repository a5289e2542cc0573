"""Hypothesis strategies for core frames, and structural equality for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from cluster import core, messages
from cluster.messages import EventFrame, SubmitFrame
from cluster.requests.acceptance_law import LAWS
from cluster.requests.draft_step import DraftStep
from cluster.requests.grammar_spec import GrammarSpec
from cluster.requests.plain_why import PlainWhy
from cluster.requests.redraw import Redraw
from cluster.requests.step_count import StepCount
from cluster.spec.token_log import prefix_hash
from cluster.spec.tree import monotone
from tests.support.spec.trees import token_trees

_MAX32 = 2**31 - 1

# UTF-8 has no surrogates, and protobuf refuses them.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
lengths = st.integers(0, _MAX32)
hashes = st.integers(0, 2**64 - 1)
generations = st.integers(0, 2**63)
doubles = st.floats(allow_nan=False, allow_infinity=False)
singles = st.floats(allow_nan=False, allow_infinity=False, width=32)
token_ids = st.integers(0, _MAX32)


def tokens(min_size: int = 0, max_size: int = 12) -> st.SearchStrategy[core.TokenArray]:
    return st.lists(token_ids, min_size=min_size, max_size=max_size).map(core.token_array)


def trees() -> st.SearchStrategy[core.TokenTree]:
    """Well-formed ones: others do not survive the wire, nor should they."""
    return token_trees(vocab_size=_MAX32, max_nodes=10)


def survivals(tree: core.TokenTree) -> st.SearchStrategy[core.FloatArray]:
    values = st.lists(st.floats(0.0, 1.0, width=32), min_size=len(tree), max_size=len(tree))
    return values.map(lambda numbers: monotone(tree.parents, np.array(numbers, np.float32)))


def several(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=4).map(tuple)


grammars = st.builds(
    GrammarSpec,
    kind=texts,
    source=texts,
    reasoning_start=st.lists(token_ids, max_size=2).map(tuple),
    reasoning_end=st.lists(token_ids, max_size=2).map(tuple),
)

params = st.builds(
    core.SamplingParams,
    temperature=doubles,
    top_p=doubles,
    top_k=lengths,
    min_p=doubles,
    presence_penalty=doubles,
    frequency_penalty=doubles,
    repetition_penalty=doubles,
    logit_bias=st.lists(st.tuples(token_ids, doubles), max_size=4).map(tuple),
    seed=hashes,
    stream=lengths,
    max_tokens=lengths,
    min_tokens=lengths,
    stop_token_ids=st.lists(token_ids, max_size=4).map(tuple),
    prediction=st.lists(token_ids, max_size=4).map(tuple),
    forced_ids=st.lists(token_ids, max_size=4).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | grammars,
    law=st.sampled_from(LAWS),
)

speculation = st.builds(
    core.SpeculationOptions,
    enabled=st.booleans(),
    max_draft_tokens=st.none() | lengths,
    drafters=st.none() | st.lists(ids, max_size=3).map(tuple),
    latency_class=st.none() | ids,
    return_draft_sources=st.booleans(),
    law=st.none() | st.sampled_from(LAWS),
    return_draft_trees=st.booleans(),
)

logprob = st.builds(
    core.TokenLogprob,
    logprob=singles,
    top=st.lists(st.tuples(token_ids, singles), max_size=3).map(tuple),
    rank=lengths,
)


def logprobs(size: int) -> st.SearchStrategy[tuple[core.TokenLogprob, ...]]:
    return st.just(()) | st.lists(logprob, min_size=size, max_size=size).map(tuple)


opens = st.builds(
    messages.Open, ids, generations, tokens(1), hashes, lengths, params, lengths, texts,
    st.binary(max_size=16), texts, st.lists(ids, max_size=3).map(tuple), lengths, ids,
    st.booleans(), st.booleans(),
)  # fmt: skip
names = st.builds(messages.TextName, ids, generations)


def sources(size: int) -> st.SearchStrategy[npt.NDArray[np.uint32]]:
    bits = st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size)
    return bits.map(lambda numbers: np.array(numbers, np.uint32))


@st.composite
def pool_trees(draw: st.DrawFn) -> messages.PoolTree:
    tree = draw(trees())
    return messages.PoolTree(
        draw(ids), draw(generations), draw(lengths), draw(hashes), tree, draw(survivals(tree)),
        draw(sources(len(tree))), draw(st.lists(doubles, max_size=3).map(tuple)),
    )  # fmt: skip


@st.composite
def draft_steps(draw: st.DrawFn) -> DraftStep:
    tree = draw(trees())
    path = draw(st.lists(st.integers(0, len(tree) - 1), max_size=3)) if len(tree) else []
    return DraftStep(
        draw(several(ids)), tree.token_ids, tree.parents, draw(survivals(tree)),
        draw(sources(len(tree))), core.token_array(path), draw(tokens(0, 1)), draw(doubles),
        draw(doubles), draw(lengths), draw(texts), draw(lengths), draw(doubles),
    )  # fmt: skip


redraws = st.builds(Redraw, lengths, lengths, st.floats(min_value=0.0))


@st.composite
def verdicts(draw: st.DrawFn) -> messages.TextVerdict:
    size = draw(st.integers(0, 6))
    return messages.TextVerdict(
        draw(ids), draw(generations), draw(lengths), draw(tokens(size, size)),
        draw(sources(max(size - 1, 0))), draw(st.lists(lengths, max_size=3).map(tuple)),
        draw(lengths), draw(st.lists(lengths, max_size=3).map(tuple)),
        draw(st.lists(lengths, max_size=3).map(tuple)), draw(st.sampled_from(PlainWhy)),
        draw(st.none() | st.sampled_from(core.FinishReason)),
        draw(logprobs(size)) if size else (), draw(lengths), (), draw(st.none() | draft_steps()),
        draw(several(redraws)),
    )  # fmt: skip


refusals = st.builds(messages.Refusal, ids, generations, ids, texts)
reports = st.builds(
    messages.StepReport, doubles, doubles, doubles, doubles, lengths, lengths, lengths, lengths,
    lengths, lengths, lengths,
)  # fmt: skip
commits = st.builds(
    core.Commit, ids, generations, lengths, hashes, tokens(), lengths, lengths, ids,
    st.none() | params, st.binary(max_size=16),
)  # fmt: skip


@st.composite
def proposals(draw: st.DrawFn) -> core.Proposal:
    tree = draw(trees())
    return core.Proposal(
        draw(ids), draw(generations), draw(lengths), draw(hashes), tree, draw(survivals(tree)),
        draw(ids), draw(st.booleans()),
    )  # fmt: skip


observations = st.builds(core.Observation, ids, generations, lengths)
requests = st.builds(
    core.Request,
    ids,
    tokens(1),
    params,
    ids,
    speculation,
    tokens(),
    st.booleans(),
    st.binary(max_size=16),
    texts,
)
stats = st.builds(
    core.SpeculationStats, lengths, lengths, lengths, lengths,
    st.lists(lengths, max_size=5).map(tuple), st.dictionaries(ids, lengths, max_size=3), ids,
    st.dictionaries(ids, lengths, max_size=3), st.dictionaries(ids, lengths, max_size=3),
    st.floats(0.0, 60.0),
)  # fmt: skip


step_counts = st.builds(
    StepCount, several(several(ids)), lengths, st.dictionaries(ids, lengths, max_size=3), doubles
)


@st.composite
def events(draw: st.DrawFn) -> core.TokenEvent:
    array = draw(tokens())
    return core.TokenEvent(
        draw(ids), draw(lengths), array, draw(logprobs(len(array))) if len(array) else (),
        draw(st.none() | st.sampled_from(core.FinishReason)), draw(st.none() | stats), draw(ids),
        draw(ids), draw(st.floats(0.0, 60.0)),
        draw(st.just(()) | st.tuples(*[several(ids)] * len(array))), draw(st.floats(0.0, 60.0)),
        draw(lengths), (), draw(several(draft_steps())), draw(doubles), draw(several(step_counts)),
    )  # fmt: skip


beats = st.builds(messages.Heartbeat, several(names), lengths)
loads = st.builds(messages.Load, lengths, lengths, lengths, hashes, lengths, lengths)
step_frames = st.builds(
    messages.StepFrame, several(opens), several(names), several(pool_trees()), hashes, hashes,
    st.none() | beats,
)  # fmt: skip
commit_frames = st.builds(messages.CommitFrame, several(commits), several(ids))
proposal_frames = st.builds(
    messages.ProposalFrame, several(proposals()), several(observations), several(refusals), lengths,
    lengths, lengths, doubles,
)  # fmt: skip
adapter_lists = st.builds(messages.AdapterList, several(ids), texts)
verdict_frames = st.builds(
    messages.VerdictFrame,
    several(verdicts()),
    several(refusals),
    st.none() | reports,
    hashes,
    st.none() | beats,
    st.none() | adapter_lists,
    st.binary(max_size=64),
    texts,
    st.none() | loads,
)
submit_frames = st.builds(SubmitFrame, several(requests), several(ids), several(ids))
event_frames = st.builds(
    EventFrame, several(events()), st.none() | adapter_lists,
    st.none() | loads,
)  # fmt: skip


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
