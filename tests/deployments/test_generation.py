"""One request through the ingress, from its specification to text, without Ray."""

import asyncio
import dataclasses
from typing import Any

import pytest

from cluster.core import SamplingParams, token_array
from cluster.errors import CapacityError, RequestError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation
from deployments.ingress.spec import GenerationSpec, Prompt
from tests.support.coordinator.toys import plain_text
from tests.support.deployments.stage import alone

PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
WARM = SamplingParams(temperature=1.0, max_tokens=12)


def spec(*prompts: Prompt, params: SamplingParams = PARAMS) -> GenerationSpec:
    return GenerationSpec(prompts, params, seed=5, ignore_eos=True)


def tokens(*token_ids: int) -> Prompt:
    return Prompt(token_ids=token_array(token_ids))


async def run(generation: Generation) -> list[int]:
    """The tokens of the only choice."""
    (found,) = (await run_all(generation)).values()
    return found


async def run_all(generation: Generation) -> dict[int, list[int]]:
    """The tokens of every choice."""
    await generation.start()
    found: dict[int, list[int]] = {}
    try:
        async with asyncio.timeout(20):
            async for deltas in generation.deltas():
                for delta in deltas:
                    found.setdefault(delta.index, []).extend(delta.token_ids.tolist())
    finally:
        generation.close()
    return found


def create(asked: GenerationSpec, tokenizer: Tokenizer, ingress: Coordinators) -> Generation:
    return Generation("name", asked, tokenizer, ingress, max_chars_per_token=16.0)


async def test_requests_with_the_same_id_are_served_independently(tokenizer: Tokenizer):
    async with alone() as (ingress, *_):
        prompts = ([1, 2, 3], [4, 5])
        generations = [create(spec(tokens(*prompt)), tokenizer, ingress) for prompt in prompts]
        found = await asyncio.gather(*map(run, generations))
        params = dataclasses.replace(PARAMS, seed=5)
        assert found == [plain_text(prompt, params) for prompt in prompts]
        assert [generation.id for generation in generations] == ["name", "name"]


async def test_a_prompt_without_tokens_is_refused(tokenizer: Tokenizer):
    async with alone() as (ingress, *_):
        generation = create(spec(Prompt(text="")), tokenizer, ingress)
        with pytest.raises(RequestError, match="no tokens"):
            await generation.start()


def said(text: str, **more: Any) -> Prompt:
    return Prompt(messages=({"role": "user", "content": text},), **more)


TOO_LONG = r"prompt is too long: \d+ tokens > 63 maximum"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        # Sixteen characters per token of context: one more is refused for its characters.
        (Prompt(text="q" * 1025), rf"{TOO_LONG}.*1025 characters.*max_chars_per_token"),
        (said("q" * 1025), rf"{TOO_LONG}.*1025 characters.*max_chars_per_token"),
        (Prompt(text="q" * 1024), TOO_LONG),
        (said("q" * 1024), TOO_LONG),
        # What a template is given counts before it is rendered.
        (said("q", arguments={"ours": ["q" * 600, "q" * 600]}), f"{TOO_LONG}.*characters"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, prompt: Prompt, reason: str
):
    async with alone(context=64) as (ingress, *_):
        with pytest.raises(RequestError, match=reason) as caught:
            await create(spec(prompt), tokenizer, ingress).start()
        assert caught.value.param == "prompt"


async def test_many_long_prompts_are_encoded_as_each_would_be(tokenizer: Tokenizer):
    async with alone() as (ingress, *_):
        texts = ["dog " * 700, "fox " * 700, "lazy " * 700]
        generation = create(spec(*map(Prompt, texts)), tokenizer, ingress)
        await generation.start()
        found = [ids.tolist() for ids in generation.prompt_ids]
        generation.close()
        assert found == [tokenizer.encode(text).tolist() for text in texts]


async def test_with_a_seed_every_choice_of_every_prompt_has_a_stream_of_its_own(
    tokenizer: Tokenizer,
):
    async with alone() as (ingress, *_):
        asked = dataclasses.replace(spec(*[tokens(1, 2, 3)] * 2, params=WARM), num_choices=2)
        generation = create(asked, tokenizer, ingress)
        found = await run_all(generation)
        params = [dataclasses.replace(WARM, seed=5, stream=stream) for stream in range(4)]
        assert [found[index] for index in range(4)] == [plain_text([1, 2, 3], p) for p in params]
        assert {generation.seed_of(index) for index in range(4)} == {5}


@pytest.mark.parametrize(
    ("default", "min_tokens", "count"), [(0, 0, 61), (16, 0, 16), (16, 20, 20), (500, 0, 61)]
)
async def test_without_max_tokens_the_default_applies_within_the_context(
    tokenizer: Tokenizer, default: int, min_tokens: int, count: int
):
    async with alone(context=64) as (ingress, *_):
        params = dataclasses.replace(PARAMS, max_tokens=0, min_tokens=min_tokens)
        asked = dataclasses.replace(
            spec(tokens(1, 2, 3), params=params), default_max_tokens=default
        )
        assert len(await run(create(asked, tokenizer, ingress))) == count


async def test_a_refused_request_gets_a_retry_delay(tokenizer: Tokenizer):
    full = alone(max_running_sequences=1, max_queued_requests=0)
    async with full as (ingress, only, busy):
        asked = spec(tokens(1, 2, 3))
        for _ in range(2):
            busy.gate.clear()
            num_frames = len(busy.frames)
            running = asyncio.create_task(run(create(asked, tokenizer, ingress)))
            await busy.wait_for_frames(num_frames + 1)
            refused = create(asked, tokenizer, ingress)
            await refused.start()
            with pytest.raises(CapacityError) as caught:
                await anext(refused.deltas())
            refused.close()
            only.clock.now += 40.0
            busy.gate.set()
            await running
        # The first request took 40 s, and nothing is known of any other.
        assert caught.value.retry_after_s == pytest.approx(40.0)
