"""Hypothesis strategies for requests and responses of the public service."""

from __future__ import annotations

from hypothesis import strategies as st

from cluster.rpc.generation import (
    ChatMessage,
    ChoiceDelta,
    GenerationRequest,
    GenerationResponse,
    SamplingOptions,
)
from tests.support.rpc.frames_strategy import of, several, texts, tokens

public_requests = of(
    GenerationRequest,
    prompt=texts | several(of(ChatMessage)) | tokens(),
    sampling=of(SamplingOptions, grammar=st.none()),
    n=st.integers(1, 9),
)
public_responses = of(
    GenerationResponse,
    choices=several(of(ChoiceDelta, logprobs=st.just(()), draft_steps=st.just(()))),
)
