"""A hypothesis strategy for requests of the public service."""

from __future__ import annotations

from hypothesis import strategies as st

from cluster.rpc.generation import ChatMessage, GenerationRequest, SamplingOptions
from tests.support.rpc.frames_strategy import of, several, texts, tokens

public_requests = of(
    GenerationRequest,
    prompt=texts | several(of(ChatMessage)) | tokens(),
    sampling=of(SamplingOptions, grammar=st.none()),
    n=st.integers(1, 9),
)
