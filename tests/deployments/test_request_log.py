"""The line that every request has in the log, and what never stands in it."""

import logging
import re

import pytest

from cluster.config.schema import Config, IngressConfig
from cluster.errors import DrafthouseError, RequestError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.generation import Generation
from deployments.ingress.spec import GenerationSpec, Prompt
from deployments.ingress.tracing import write_line
from tests.deployments.test_generation import PARAMS, run_all, tokens
from tests.support.coordinator.toys import ToyDrafter, ToyTarget, oracle_chain
from tests.support.deployments.place import place
from tests.support.deployments.stage import alone

SECRET = "quartz xylophone"
LINE = re.compile(
    r"request id=(\S+) task=(\S+) prompt_tokens=(\d+) output_tokens=(\d+) queue_ms=(\d+) "
    r"ttft_ms=(\d+|-) total_ms=(\d+) finish=(\S+) accepted_drafts=(\d+)/(\d+)"
)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def create(prompt: Prompt, tokenizer: Tokenizer, ingress: Coordinators) -> Generation:
    asked = GenerationSpec((prompt,), PARAMS, seed=5, ignore_eos=True, num_choices=2)
    generation = Generation("the-id", asked, tokenizer, ingress, 16.0)
    generation.when_closed.append(write_line)
    return generation


def lines(caplog: pytest.LogCaptureFixture) -> list[re.Match[str]]:
    return [found for found in map(LINE.fullmatch, caplog.messages) if found]


async def test_a_request_has_one_line_when_it_has_ended(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    async with alone(["a"]) as (ingress, only, _):
        only.add_drafter(ToyDrafter("a", oracle_chain()))
        generation = create(tokens(1, 2, 3), tokenizer, ingress)
        await run_all(generation)
        generation.close()
        (line,) = lines(caplog)
        assert line.group(1, 2, 3, 4, 8) == ("the-id", "default", "3", "24", "length")
        accepted, drafted = map(int, line.group(9, 10))
        stats = generation.stats
        assert (accepted, drafted) == (stats.num_accepted_draft_tokens, stats.num_draft_tokens)
        assert 0 < accepted <= drafted
        assert int(line.group(6)) <= int(line.group(7))


async def test_the_line_of_a_refused_text_holds_nothing_of_it(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    async with alone() as (ingress, *_):
        with pytest.raises(RequestError):  # its tokens are outside the toy's vocabulary
            await run_all(create(Prompt(text=SECRET), tokenizer, ingress))
        (line,) = lines(caplog)
        assert line.group(8) == "invalid_request_error"
        assert "xylophone" not in caplog.text


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_switch_keeps_the_log_empty(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, *, is_on: bool
):
    async with place(tokenizer, Config(ingress=IngressConfig(log_requests=is_on))) as here:
        answer = await here.ask("/v1/completions", prompt="a", max_tokens=2)
        assert answer.status_code == 200
    assert len(lines(caplog)) == int(is_on)


async def test_a_client_that_went_and_an_error_are_told_apart(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    full = alone(max_queued_requests=1, max_running_sequences=1)
    async with full as (ingress, only, _):
        toy = ToyTarget()
        toy.gate.clear()
        only.add_target(toy)
        gone = create(tokens(1, 2), tokenizer, ingress)
        await gone.start()
        refused = create(tokens(3), tokenizer, ingress)
        with pytest.raises(DrafthouseError) as raised:
            await run_all(refused)
        gone.close()
        codes = [line.group(6, 8) for line in lines(caplog)]
        assert codes == [("-", raised.value.code), ("-", "cancelled")]
