"""The HTTP API of a real application on real Ray, mostly with OpenAI's client."""

import json
import socket
from collections import Counter
from urllib.parse import urlsplit

import jsonschema
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.ingress.api.writer import STATISTICS, statistics_schema
from tests.deployments.conftest import Served, wait_until
from tests.support.deployments.api import MODEL

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


@pytest.fixture
def openai(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=120, max_retries=0)


def test_greedy_text_is_that_of_transformers(served: Served):
    tokenizer = AutoTokenizer.from_pretrained(served.target_folder)
    model = AutoModelForCausalLM.from_pretrained(served.target_folder, dtype=torch.float32)
    for prompt in ("a", "Once upon a time", "x = [1, 2, 3]\n" * 8):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, ids.shape[1] :].tolist()
        choice = served.api.complete(prompt=prompt, **GREEDY, return_token_ids=True)
        assert choice["token_ids"] == wanted
        assert choice["prompt_token_ids"] == ids[0].tolist()


def test_a_completion_has_usage_and_speculation_statistics(served: Served):
    answer = served.api.ask(COMPLETIONS, prompt="hello", **GREEDY)
    usage, choice = answer["usage"], answer["choices"][0]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert choice["finish_reason"] == "length"
    statistics = answer["metrics"]["speculative_decoding"]
    jsonschema.validate(statistics, statistics_schema())
    assert set(statistics) == {rule.name for rule in STATISTICS if rule.is_required}
    by_drafter = statistics["accepted_by_drafter"].values()
    assert sum(by_drafter) == statistics["num_accepted_draft_tokens"]
    assert (statistics["idle_because"] is None) == (statistics["num_spec_steps"] > 0)
    # As aiperf reads it.
    assert len(statistics["acceptance_histogram"]) == statistics["num_spec_tokens"] + 1
    # OpenAI's name for parts of the request's own `prediction`, which is something else.
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


def test_an_answer_says_whose_drafts_its_tokens_were(served: Served):
    asked = {"prompt": "abc abc abc abc", "return_draft_sources": True, **GREEDY}
    answer = served.api.ask(COMPLETIONS, **asked)
    (choice,) = answer["choices"]
    sources, statistics = choice["draft_sources"], answer["metrics"]["speculative_decoding"]
    assert len(sources) == answer["usage"]["completion_tokens"]
    text = b"".join(bytes(source["bytes"]) for source in sources).decode(errors="replace")
    assert text == choice["text"]
    named = {name for source in sources for name in source["drafters"]}
    assert named
    counted = {*statistics["accepted_by_drafter"], *statistics["shared_by_drafter"]}
    assert named <= counted <= {"lm", "lookup", "ngram", "suffix"}
    whose = Counter(source["drafters"][0] for source in sources if source["drafters"])
    for name, count in whose.items():
        # Where the end of the text cuts a path, more was accepted than emitted.
        assert count <= statistics["accepted_by_drafter"][name]
    streamed = served.api.stream(COMPLETIONS, **asked)
    pieces = [each for event in streamed for each in event["choices"][0]["draft_sources"]]
    assert [piece["token"] for piece in pieces] == [source["token"] for source in sources]
    assert "draft_sources" not in served.api.complete(prompt="a", **GREEDY)


def test_streamed_and_whole_answers_have_the_same_text(openai: OpenAI):
    messages = [{"role": "user", "content": "tell me"}]
    fields = {"messages": messages, "model": MODEL, "temperature": 0.8, "seed": 5}
    whole = openai.chat.completions.create(**fields, max_tokens=32)
    stream = openai.chat.completions.create(
        **fields, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "speculative_decoding" in chunks[-1].model_extra["metrics"]


def test_the_last_chunk_without_usage_still_has_the_statistics(served: Served):
    chunks = served.api.stream(COMPLETIONS, prompt="abc", **GREEDY)
    assert "metrics" in chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("metrics" not in chunk for chunk in chunks[:-1])


def test_equal_prompts_have_texts_of_their_own_and_say_their_seeds(served: Served):
    fields = {"temperature": 1, "max_tokens": 16, "ignore_eos": True}
    for seed in (None, 9):
        body = {"prompt": ["same"] * 4, "seed": seed, **fields}
        choices = served.api.ask(COMPLETIONS, **body)["choices"]
        assert len({choice["text"] for choice in choices}) == 4
        assert len({choice["seed"] for choice in choices}) == (4 if seed is None else 1)
        text = choices[3]["text"]
        if seed is None:  # its seed alone gives the text again
            again = {**body, "prompt": "same", "seed": choices[3]["seed"]}
            chunks = served.api.stream(COMPLETIONS, **again)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            assert {chunk["choices"][0]["seed"] for chunk in chunks} == {choices[3]["seed"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(served: Served, stream: bool):
    body = json.dumps(
        {"model": MODEL, "prompt": "long", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: served.metric("drafthouse_running_requests") == 1)
        wait_until(lambda: served.metric("drafthouse_kv_pages_in_use", role="target") > 0)
    wait_until(lambda: served.metric("drafthouse_running_requests") == 0)
    wait_until(lambda: served.metric("drafthouse_kv_pages_in_use") == 0)
    wait_until(lambda: served.metric("drafthouse_drafter_requests") == 0)
