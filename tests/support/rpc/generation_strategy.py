"""Hypothesis strategies for requests and responses of the public service."""

from __future__ import annotations

from hypothesis import strategies as st

from cluster.core import FinishReason
from cluster.rpc.generation import (
    ChatMessage,
    ChoiceDelta,
    GenerationRequest,
    GenerationResponse,
    ResumedChoice,
    SamplingOptions,
    Usage,
)
from tests.support.rpc.frames_strategy import speculation, stats, token_ids, tokens

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
counts = st.none() | st.integers(0, 2**31 - 1)
numbers = st.none() | st.floats(allow_nan=False)
samplings = st.builds(
    SamplingOptions,
    temperature=numbers,
    top_p=numbers,
    top_k=counts,
    min_p=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    logit_bias=st.dictionaries(token_ids, st.floats(allow_nan=False), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=counts,
    min_tokens=counts,
    stop=st.lists(texts, max_size=3).map(tuple),
    include_stop=st.booleans(),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=counts,
    prompt_logprobs=counts,
)
chats = st.lists(st.builds(ChatMessage, texts, texts, texts), max_size=3).map(tuple)
public_requests = st.builds(
    GenerationRequest,
    model=texts,
    prompt=texts | chats | tokens(),
    sampling=samplings,
    n=st.integers(1, 9),
    speculation=speculation,
    metadata=st.dictionaries(texts, texts, max_size=2),
    resume=st.lists(st.builds(ResumedChoice, counts.map(lambda c: c or 0), tokens(), st.booleans()))
    .map(tuple),
    request_id=texts,
    prediction=texts,
)  # fmt: skip

public_responses = st.builds(
    GenerationResponse,
    id=texts,
    model=texts,
    seed=st.integers(0, 2**64 - 1),
    choices=st.lists(
        st.builds(
            ChoiceDelta,
            index=st.integers(0, 9),
            text=texts,
            token_ids=tokens(),
            finish_reason=st.none() | st.sampled_from(FinishReason),
            stop=st.none() | texts,
        ),
        max_size=3,
    ).map(tuple),
    usage=st.none() | st.builds(Usage, st.integers(0, 2**31), st.integers(0, 2**31)),
    speculative_decoding=st.none() | stats,
)
