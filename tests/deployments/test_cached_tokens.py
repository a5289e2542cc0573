"""How much of a prompt was in the prefix cache, as every endpoint says it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments.server import Server
from tests.support.local_models import engine


@pytest.fixture
def page_size(llama_folder: Path) -> int:
    return engine(llama_folder).page_size


def complete(server: Server, prompt: list[int] | list[list[int]], **body: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "prompt": prompt, "max_tokens": 2}
    return dict(server.ask("/v1/completions", **asked, **body)["usage"])


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_full_pages_of_an_earlier_prompt_are_counted(server: Server, page_size: int):
    prompt = [(7 * i) % 200 + 5 for i in range(5 * page_size + 3)]
    assert cached(complete(server, prompt)) == 0
    assert cached(complete(server, prompt)) == 5 * page_size
    # What differs is behind the third page.
    assert cached(complete(server, [*prompt[: 3 * page_size + 1], *[9] * 40])) == 3 * page_size
    assert cached(complete(server, prompt, cache_salt="other")) == 0


def test_prompts_are_counted_once_each_and_samples_of_one_are_not(server: Server, page_size: int):
    first = [(11 * i) % 200 + 5 for i in range(2 * page_size + 1)]
    second = [(13 * i) % 200 + 5 for i in range(3 * page_size + 1)]
    # The other samples share the first one's pages; what the request itself computed is no hit.
    assert cached(complete(server, first, n=3, seed=1)) == 0
    complete(server, second)
    assert cached(complete(server, [first, second], n=2, seed=1)) == 5 * page_size


def test_the_samples_of_a_scored_prompt_find_it_in_the_cache(
    server: Server, page_size: int, monkeypatch: pytest.MonkeyPatch
):
    prompt = [(23 * i) % 200 + 5 for i in range(4 * page_size + 1)]
    hits: list[int] = []
    submit = server.ingress.coordinators.submit

    async def spied(request: Any, arrived: Any) -> Any:
        ticket = await submit(request, arrived)
        take = ticket.take

        def taken() -> Any:
            events = take()
            if not request.params.forced_ids:
                hits.extend(event.num_cached for event in events)
            return events

        ticket.take = taken
        return ticket

    monkeypatch.setattr(server.ingress.coordinators, "submit", spied)
    complete(server, prompt, prompt_logprobs=0)
    assert set(hits) == {4 * page_size}


def test_every_endpoint_says_it_in_its_own_words(server: Server, page_size: int):
    """The same conversation again: all of it but the last, broken page and what follows it."""
    text = "Tell me of the river, of the mill, and of the years since. " * 3
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    usage = server.ask("/v1/chat/completions", **chat)["usage"]
    expected = (usage["prompt_tokens"] - 1) // page_size * page_size
    assert expected > page_size
    assert cached(server.ask("/v1/chat/completions", **chat)["usage"]) == expected
    responses = {"input": text, "max_output_tokens": 2, "store": False}
    found = server.ask("/v1/responses", **responses)["usage"]
    assert found["input_tokens_details"]["cached_tokens"] == expected
    found = server.ask("/v1/messages", **chat)["usage"]
    assert found["cache_read_input_tokens"] == expected
    assert found["input_tokens"] + expected == usage["prompt_tokens"]
