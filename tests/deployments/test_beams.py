"""Beam search at the ingress: what may be asked, and how one search becomes n choices."""

import asyncio
import json
from typing import Any

import pytest

from cluster.client import GenerateRequest, SamplingOptions
from cluster.client.generated.common_pb2 import EARLY_STOPPING_NEVER, BeamSearch
from cluster.errors import RequestError
from cluster.requests.fields import BeamSpec
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.generation import Generation
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import CompletionBody
from deployments.ingress.openai_response import Answer
from tests.coordinator.test_beams import ENDS, TOKENS, BeamTarget
from tests.deployments.test_openai_request import LIMITS, completion
from tests.support.coordinator.house import house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import stage

BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}


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
async def test_one_search_answers_with_the_best_texts_in_order(
    tokenizer: Tokenizer, num_prompts: int
):
    target = BeamTarget()
    prompts = [[5, 6, 7], [8, 9]][:num_prompts]
    asked = CompletionBody.parse(
        completion(**{**BEAMS, "n": 2, "best_of": 3, "return_token_ids": True, "prompt": prompts}),
        LIMITS,
    )
    async with stage() as setting, house() as only, asyncio.timeout(20):
        setting.add("a", only, target)
        await asyncio.sleep(0)
        generation = Generation("a", asked.spec, tokenizer, setting.ingress, 16.0)
        await generation.start()
        deltas = [delta async for pieces in generation.deltas() for delta in pieces]
        body = json.loads(Answer(asked, generation, "id").whole(deltas))
        generation.close()
        await only.settle()
        assert only.coordinator.status()["num_running"] == 0
    items = target.items
    assert len(items) == num_prompts, "one search per prompt"
    texts = [list(TOKENS[:2]), []] * num_prompts
    assert [choice["token_ids"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    values = [end.logprob for end in ENDS[:2]] * num_prompts
    assert [choice["cumulative_logprob"] for choice in body["choices"]] == values
    assert body["usage"]["completion_tokens"] == 2 * num_prompts


async def test_a_search_that_is_refused_after_its_admission_ends_with_the_reason(
    tokenizer: Tokenizer,
):
    target = ToyTarget(refuses=lambda item: RequestError("too many beams"))
    target.gate.clear()
    asked = CompletionBody.parse(completion(**BEAMS, prompt=[5, 6, 7]), LIMITS)
    async with stage() as setting, house() as only, asyncio.timeout(20):
        setting.add("a", only, target)
        await asyncio.sleep(0)
        generation = Generation("a", asked.spec, tokenizer, setting.ingress, 16.0)
        await generation.start()
        # The news of its admission is read, and kept, before anything is refused.
        await generation.admitted()
        target.gate.set()
        with pytest.raises(RequestError, match="too many beams"):
            _ = [deltas async for deltas in generation.deltas()]
        generation.close()
