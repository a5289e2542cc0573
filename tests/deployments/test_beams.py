"""Beam search at the ingress: what may be asked, and how one search becomes n choices."""

import asyncio
import json

import pytest

from cluster.client import Client, GenerateRequest, SamplingOptions, TokenIds
from cluster.client.generated.common_pb2 import EARLY_STOPPING_NEVER, BeamSearch
from cluster.core import token_array
from cluster.errors import RequestError
from cluster.requests.fields import BeamSpec
from cluster.rpc.codec import BEAM_SPEC
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import CompletionBody
from deployments.ingress.openai_response import Answer
from tests.coordinator.test_beams import ENDS, TOKENS, BeamTarget
from tests.deployments.conftest import Served
from tests.deployments.test_generation import create
from tests.deployments.test_openai_request import LIMITS, completion
from tests.engine.test_beam_search import expected
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.api import MODEL
from tests.support.deployments.stage import alone
from tests.support.engine.driver import load_oracle

BEAMS = {"use_beam_search": True, "n": 3}


def test_grpc_searches_too():
    search = BeamSearch(length_penalty=2.0, early_stopping=EARLY_STOPPING_NEVER)
    options = SamplingOptions(beam_search=search, max_tokens=5)
    found = to_spec(GenerateRequest(model="demo", text="hello", sampling=options, n=2), LIMITS)
    assert found.params.beams == BeamSpec(2, 2.0, "never")
    assert found.num_choices == 2


def test_what_shapes_a_draw_has_no_effect():
    warm = {**BEAMS, "temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1}
    plain, found = (
        CompletionBody.parse(completion(**fields), LIMITS).spec.params for fields in (BEAMS, warm)
    )
    assert found == plain


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_one_search_answers_with_the_best_texts_in_order(num_prompts: int):
    target = BeamTarget()
    prompts = [[5, 6, 7], [8, 9]][:num_prompts]
    asked = CompletionBody.parse(
        completion(**{**BEAMS, "n": 2, "best_of": 3, "return_token_ids": True, "prompt": prompts}),
        LIMITS,
    )
    async with alone(toy=target) as (ingress, only, _), asyncio.timeout(20):
        generation = create(asked.spec, ingress)
        await generation.start()
        deltas = [delta async for pieces in generation.deltas() for delta in pieces]
        body = json.loads(Answer(asked, generation, "id").whole(deltas))
        generation.close()
        await only.settle()
        assert only.coordinator.status()["num_running"] == 0
    assert len(target.items) == num_prompts, "one search per prompt"
    texts = [list(TOKENS[:2]), []] * num_prompts
    assert [choice["token_ids"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    values = [end.logprob for end in ENDS[:2]] * num_prompts
    assert [choice["cumulative_logprob"] for choice in body["choices"]] == values
    assert body["usage"]["completion_tokens"] == 2 * num_prompts


async def test_a_search_that_is_refused_after_its_admission_ends_with_the_reason():
    target = ToyTarget(refuses=lambda item: RequestError("too many beams"))
    target.gate.clear()
    asked = CompletionBody.parse(completion(**BEAMS, prompt=[5, 6, 7]), LIMITS)
    async with alone(toy=target) as (ingress, *_), asyncio.timeout(20):
        generation = create(asked.spec, ingress)
        await generation.start()
        # The news of its admission is read, and kept, before anything is refused.
        await generation.admitted()
        target.gate.set()
        with pytest.raises(RequestError, match="too many beams"):
            _ = [deltas async for deltas in generation.deltas()]
        generation.close()


PROMPT = [9, 8, 7, 6, 5] * 3
STOPS = tuple(range(2, 288, 24))


def test_http_and_grpc_give_the_texts_of_transformers(served: Served):
    """Through the whole stack."""
    spec = BeamSpec(4, 0.5)
    wanted = expected(load_oracle(served.target_folder), token_array(PROMPT), spec, 12, STOPS)[:3]
    texts = [text[:-1] if text[-1] in STOPS else text for text, _ in wanted]
    choices = served.api.ask(
        "/v1/completions",
        prompt=PROMPT,
        n=3,
        best_of=4,
        use_beam_search=True,
        max_tokens=12,
        ignore_eos=True,
        return_token_ids=True,
        stop_token_ids=STOPS,
        length_penalty=0.5,
    )["choices"]
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
