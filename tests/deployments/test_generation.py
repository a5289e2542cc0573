"""One request through the ingress, from its specification to text and its line in the log,
without Ray."""

import asyncio
import logging
import re
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.schema import Config, IngressConfig
from cluster.core import SamplingParams, token_array
from cluster.errors import CapacityError, DeadlineError, DrafthouseError, RequestError
from cluster.text.prompt import Prompt
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation
from deployments.ingress.prompts import encode_all
from deployments.ingress.spec import GenerationSpec, Resumed
from deployments.ingress.tracing import write_line
from tests.deployments.test_openai_request import PLAIN
from tests.support.coordinator.toys import ToyDrafter, oracle_chain, plain_text
from tests.support.deployments.place import place
from tests.support.deployments.stage import alone, toys_ingress
from tests.support.errors import request_error
from tests.support.text.tokenizers_for_tests import small_tokenizer

PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = replace(PARAMS, seed=5)
WARM = SamplingParams(temperature=1.0, max_tokens=12)


def spec(*prompts: Prompt, params: SamplingParams = PARAMS) -> GenerationSpec:
    return replace(PLAIN, prompts=prompts, params=params, seed=5, ignore_eos=True)


def tokens(*token_ids: int) -> Prompt:
    return Prompt(token_ids=token_array(token_ids))


ONE = tokens(1, 2, 3)


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


def create(asked: GenerationSpec, ingress: Coordinators) -> Generation:
    return Generation("name", asked, small_tokenizer(), ingress, max_chars_per_token=16.0)


async def test_requests_with_the_same_id_are_served_independently():
    async with alone() as (ingress, *_):
        prompts = ([1, 2, 3], [4, 5])
        generations = [create(spec(tokens(*prompt)), ingress) for prompt in prompts]
        found = await asyncio.gather(*map(run, generations))
        assert found == [plain_text(prompt, SEEDED) for prompt in prompts]
        assert [generation.id for generation in generations] == ["name", "name"]


async def test_what_a_client_has_already_is_not_counted_again():
    async with alone() as (ingress, *_):
        whole = plain_text([1, 2, 3], SEEDED)
        resumed = {0: Resumed(token_array(whole[:5]))}
        generation = create(replace(spec(ONE), resumed=resumed), ingress)
        assert await run(generation) == whole[5:]
        assert generation.tokens["output"] == len(whole[5:])


async def test_a_deadline_holds_while_there_is_no_coordinator():
    with pytest.raises(DeadlineError):
        await toys_ingress(Config()).generate("name", spec(tokens(1)), 0.05)


async def test_a_prompt_without_tokens_is_refused():
    async with alone() as (ingress, *_):
        generation = create(spec(Prompt(text="")), ingress)
        with request_error("no tokens"):
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
    prompt: Prompt, reason: str
):
    async with alone(context=64) as (ingress, *_):
        with request_error(reason, "prompt"):
            await create(spec(prompt), ingress).start()


async def test_many_long_prompts_are_encoded_as_each_would_be():
    async with alone() as (ingress, *_):
        texts = ["dog " * 700, "fox " * 700, "lazy " * 700]
        generation = create(spec(*map(Prompt, texts)), ingress)
        await generation.start()
        found = [prompt.token_ids.tolist() for prompt in generation.prompts]
        generation.close()
        assert found == [small_tokenizer().encode(text).tolist() for text in texts]


async def test_long_reasoning_is_rendered_in_another_thread():
    """It counts for no more: a template may leave it out."""
    rendering = SimpleNamespace(apply_chat_template=lambda *_, **__: get_ident())
    prompt = Prompt(messages=({"content": "", "reasoning_content": "q" * 9000},))
    encoding = encode_all([prompt], rendering, 1, 1.0, add_special_tokens=False)
    assert await encoding != [get_ident()]


async def test_with_a_seed_every_choice_of_every_prompt_has_a_stream_of_its_own():
    async with alone() as (ingress, *_):
        asked = replace(spec(*[ONE] * 2, params=WARM), num_choices=2)
        generation = create(asked, ingress)
        found = await run_all(generation)
        params = [replace(WARM, seed=5, stream=stream) for stream in range(4)]
        assert [found[index] for index in range(4)] == [plain_text([1, 2, 3], p) for p in params]
        assert {generation.prompt_of(index).seed for index in range(4)} == {5}


@pytest.mark.parametrize(
    ("default", "min_tokens", "count"), [(0, 0, 61), (16, 0, 16), (16, 20, 20), (500, 0, 61)]
)
async def test_without_max_tokens_the_default_applies_within_the_context(
    default: int, min_tokens: int, count: int
):
    async with alone(context=64) as (ingress, *_):
        params = replace(PARAMS, max_tokens=0, min_tokens=min_tokens)
        asked = replace(spec(ONE, params=params), default_max_tokens=default)
        assert len(await run(create(asked, ingress))) == count


async def test_a_refused_request_gets_a_retry_delay():
    full = alone(max_running_sequences=1, max_queued_requests=0)
    async with full as (ingress, only, busy):
        asked = spec(ONE)
        for _ in range(2):
            busy.gate.clear()
            num_frames = len(busy.frames)
            running = asyncio.create_task(run(create(asked, ingress)))
            await busy.wait_for_frames(num_frames + 1)
            refused = create(asked, ingress)
            await refused.start()
            with pytest.raises(CapacityError) as caught:
                await anext(refused.deltas())
            refused.close()
            only.clock.now += 40.0
            busy.gate.set()
            await running
        # The first request took 40 s, and nothing is known of any other.
        assert caught.value.retry_after_s == pytest.approx(40.0)


# The line that every request has in the log.
SECRET = "quartz xylophone"
LINE = re.compile(
    r"request id=(\S+) task=(\S+) prompt_tokens=(\d+) output_tokens=(\d+) queue_ms=(\d+) "
    r"ttft_ms=(\d+|-) total_ms=(\d+) finish=(\S+) accepted_drafts=(\d+)/(\d+)"
)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def noted(prompt: Prompt, ingress: Coordinators) -> Generation:
    generation = create(replace(spec(prompt), num_choices=2), ingress)
    generation.when_closed.append(write_line)
    return generation


def lines(caplog: pytest.LogCaptureFixture) -> list[re.Match[str]]:
    return [found for found in map(LINE.fullmatch, caplog.messages) if found]


async def test_a_request_has_one_line_when_it_has_ended(caplog: pytest.LogCaptureFixture):
    async with alone(["a"]) as (ingress, only, _):
        only.add_drafter(ToyDrafter("a", oracle_chain()))
        generation = noted(ONE, ingress)
        await run_all(generation)
        generation.close()
        (line,) = lines(caplog)
        assert line.group(1, 2, 3, 4, 8) == ("name", "default", "3", "24", "length")
        accepted, drafted = map(int, line.group(9, 10))
        stats = generation.stats
        assert (accepted, drafted) == (stats.num_accepted_draft_tokens, stats.num_draft_tokens)
        assert 0 < accepted <= drafted
        assert int(line.group(6)) <= int(line.group(7))


async def test_the_line_of_a_refused_text_holds_nothing_of_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    async with alone() as (ingress, *_):
        with pytest.raises(RequestError):  # its tokens are outside the toy's vocabulary
            await run_all(noted(Prompt(text=SECRET), ingress))
        (line,) = lines(caplog)
        assert line.group(8) == "invalid_request_error"
        assert "xylophone" not in caplog.text


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_switch_keeps_the_log_empty(caplog: pytest.LogCaptureFixture, *, is_on: bool):
    async with place(Config(ingress=IngressConfig(log_requests=is_on))) as here:
        answer = await here.ask("/v1/completions", prompt="a", max_tokens=2)
        assert answer.status_code == 200
    assert len(lines(caplog)) == int(is_on)


async def test_a_client_that_went_and_an_error_are_told_apart(caplog: pytest.LogCaptureFixture):
    full = alone(max_queued_requests=1, max_running_sequences=1)
    async with full as (ingress, _, toy):
        toy.gate.clear()
        gone = noted(tokens(1, 2), ingress)
        await gone.start()
        refused = noted(tokens(3), ingress)
        with pytest.raises(DrafthouseError) as raised:
            await run_all(refused)
        gone.close()
        codes = [line.group(6, 8) for line in lines(caplog)]
        assert codes == [("-", raised.value.code), ("-", "cancelled")]
