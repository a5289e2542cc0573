"""Beam search through the whole stack: the texts of transformers, over HTTP and gRPC."""

from typing import Any

import pytest

from cluster.client import Client, GenerateRequest, SamplingOptions, TokenIds
from cluster.core import token_array
from cluster.requests.fields import BeamSpec
from cluster.rpc.codec import BEAM_SPEC
from tests.deployments.conftest import Served
from tests.engine.test_beam_search import expected
from tests.support.deployments.api import MODEL
from tests.support.engine.driver import load_oracle

PROMPT = [9, 8, 7, 6, 5] * 3
STOPS = tuple(range(2, 288, 24))
ASKED: dict[str, Any] = {
    "prompt": PROMPT,
    "n": 3,
    "best_of": 4,
    "use_beam_search": True,
    "max_tokens": 12,
    "ignore_eos": True,
    "return_token_ids": True,
    "stop_token_ids": STOPS,
    "length_penalty": 0.5,
}


def test_http_and_grpc_give_the_texts_of_transformers(served: Served):
    spec = BeamSpec(4, 0.5)
    wanted = expected(load_oracle(served.target_folder), token_array(PROMPT), spec, 12, STOPS)[:3]
    texts = [text[:-1] if text[-1] in STOPS else text for text, _ in wanted]
    choices = served.api.ask("/v1/completions", **ASKED)["choices"]
    assert [choice["token_ids"] for choice in choices] == texts
    assert [choice["cumulative_logprob"] for choice in choices] == pytest.approx(
        [score * len(text) ** 0.5 for text, score in wanted], abs=1e-3
    )
    sampling = SamplingOptions(
        beam_search=BEAM_SPEC.encode(spec), max_tokens=12, stop_token_ids=STOPS, ignore_eos=True
    )
    with Client(served.grpc) as client:
        request = GenerateRequest(
            model=MODEL, tokens=TokenIds(token_ids=PROMPT), sampling=sampling, n=3
        )
        (piece,) = client.generate(request)
    found = {choice.index: choice for choice in piece.choices}
    assert [list(found[index].token_ids) for index in range(3)] == texts
    assert found[0].cumulative_logprob == pytest.approx(choices[0]["cumulative_logprob"], abs=1e-5)
