"""The HTTP API of a real application on real Ray, mostly with OpenAI's client."""

from __future__ import annotations

import json
import socket
from collections import Counter
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.ingress.usage import STATISTICS, statistics_schema
from tests.deployments.conftest import ADAPTER, MODEL, Served, wait_until

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
def openai(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.http}/v1", api_key="none", timeout=120, max_retries=0)


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.http}{path}", json=body, timeout=120)


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, without its end mark, which must be there."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_model_is_listed_and_described(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL, ADAPTER]
    assert openai.models.retrieve(MODEL).object == "model"


def test_greedy_text_is_that_of_transformers(served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.target_folder)
    model = AutoModelForCausalLM.from_pretrained(served.target_folder, dtype=torch.float32)
    for prompt in ("a", "Once upon a time", "x = [1, 2, 3]\n" * 8):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, ids.shape[1] :].tolist()
        answer = post(
            served, "/v1/completions", prompt=prompt, **GREEDY, return_token_ids=True
        ).json()
        assert answer["choices"][0]["token_ids"] == wanted
        assert answer["choices"][0]["prompt_token_ids"] == ids[0].tolist()


def test_a_completion_has_usage_and_speculation_statistics(served: Served) -> None:
    answer = post(served, "/v1/completions", prompt="hello", **GREEDY).json()
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


def test_an_answer_says_whose_drafts_its_tokens_were(served: Served) -> None:
    asked = {"prompt": "abc abc abc abc", "return_draft_sources": True, **GREEDY}
    answer = post(served, "/v1/completions", **asked).json()
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
    streamed = events(post(served, "/v1/completions", **asked, stream=True).text)
    pieces = [each for event in streamed for each in event["choices"][0]["draft_sources"]]
    assert [piece["token"] for piece in pieces] == [source["token"] for source in sources]
    assert "draft_sources" not in post(served, "/v1/completions", prompt="a", **GREEDY).text


def test_a_request_that_declines_drafts_is_told_so(served: Served) -> None:
    asked = {"prompt": "a", "speculation": {"enabled": False}, **GREEDY}
    answer = post(served, "/v1/completions", **asked).json()
    assert answer["metrics"]["speculative_decoding"]["idle_because"] == "disabled"


def test_streamed_and_whole_answers_have_the_same_text(openai: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "tell me"}]
    fields: Any = {"messages": messages, "model": MODEL, "temperature": 0.8, "seed": 5}
    whole = openai.chat.completions.create(**fields, max_tokens=32)
    stream = openai.chat.completions.create(
        **fields, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "speculative_decoding" in chunks[-1].model_extra["metrics"]


def test_the_last_chunk_without_usage_still_has_the_statistics(served: Served) -> None:
    chunks = events(post(served, "/v1/completions", prompt="abc", **GREEDY, stream=True).text)
    assert "metrics" in chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("metrics" not in chunk for chunk in chunks[:-1])


def test_text_does_not_depend_on_speculation_or_drafter(served: Served) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": "abc abc abc", "max_tokens": 40, "temperature": 0.9,
        "top_p": 0.9, "seed": 3, "frequency_penalty": 0.3, "ignore_eos": True,
    }  # fmt: skip
    choices = [
        {"enabled": False}, {}, {"drafters": ["lm"]}, {"drafters": ["lookup"]},
        {"drafters": ["ngram"]}, {"max_draft_tokens": 1},
    ]  # fmt: skip
    texts = {
        post(served, "/v1/completions", **fields, speculation=choice).json()["choices"][0]["text"]
        for choice in choices
    }
    assert len(texts) == 1


def test_several_prompts_and_samples_come_back_in_order(served: Served) -> None:
    fields = {"model": MODEL, "temperature": 1, "seed": 9, "max_tokens": 8, "ignore_eos": True}
    both = post(served, "/v1/completions", prompt=["one", "two"], n=2, **fields).json()["choices"]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]
    alone = post(served, "/v1/completions", prompt="one", n=2, **fields).json()["choices"]
    assert [choice["text"] for choice in both[:2]] == [choice["text"] for choice in alone]
    assert both[0]["text"] != both[1]["text"]


def test_equal_prompts_have_texts_of_their_own_and_say_their_seeds(served: Served) -> None:
    fields = {"model": MODEL, "temperature": 1, "max_tokens": 16, "ignore_eos": True}
    for seed in (None, 9):
        body = {"prompt": ["same"] * 4, "seed": seed, **fields}
        choices = post(served, "/v1/completions", **body).json()["choices"]
        assert len({choice["text"] for choice in choices}) == 4
        assert len({choice["seed"] for choice in choices}) == (4 if seed is None else 1)
        text = choices[3]["text"]
        if seed is None:  # its seed alone gives the text again
            again = {**body, "prompt": "same", "seed": choices[3]["seed"], "stream": True}
            chunks = events(post(served, "/v1/completions", **again).text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            assert {chunk["choices"][0]["seed"] for chunk in chunks} == {choices[3]["seed"]}


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    text = post(served, "/v1/completions", prompt="q", **GREEDY).json()["choices"][0]["text"]
    stop = text[6:9]
    for stream in (False, True):
        answer = post(served, "/v1/completions", prompt="q", **GREEDY, stop=[stop], stream=stream)
        if stream:
            chunks = events(answer.text)
            found = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            found, reason = choice["text"], choice["finish_reason"]
        assert found == text[: text.index(stop)]
        assert reason == "stop"


def test_echo_puts_the_prompt_first(served: Served) -> None:
    fields = {"prompt": "repeat", **GREEDY}
    plain = post(served, "/v1/completions", **fields).json()["choices"][0]["text"]
    echoed = post(served, "/v1/completions", **fields, echo=True).json()["choices"][0]["text"]
    assert echoed == "repeat" + plain


def test_log_probabilities_cover_every_token(served: Served) -> None:
    choice = post(served, "/v1/completions", prompt="q", **GREEDY, logprobs=3).json()["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 24
    assert all(len(top) == 3 for top in found["top_logprobs"])
    assert all(value <= 0 for value in found["token_logprobs"])
    body = {"messages": [{"role": "user", "content": "q"}], "logprobs": True, "top_logprobs": 2}
    answer = post(served, "/v1/chat/completions", **GREEDY, **body).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 24
    # Greedy: the emitted token is the most probable one.
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)


BAD: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400),
    ("/v1/completions", {"model": "gpt-5"}, 404),
    ("/v1/completions", {"temperature": -1}, 400),
    ("/v1/completions", {"temperature": "hot"}, 400),
    ("/v1/completions", {"max_tokens": 0}, 400),
    ("/v1/completions", {"prompt": "word " * 5000}, 400),
    ("/v1/completions", {"n": True}, 400),
    ("/v1/completions", {"speculation": {"max_draft_tokens": -1}}, 400),
    ("/v1/completions", {"speculation": {"drafters": ["nobody"]}}, 400),
]


@pytest.mark.parametrize(("path", "fields", "status"), BAD)
def test_bad_input_is_answered_in_openais_format(
    served: Served, path: str, fields: dict[str, Any], status: int
) -> None:
    good = {"model": MODEL, "max_tokens": 4}
    good |= {"prompt": "x"} if path == "/v1/completions" else {}
    for stream in (False, True):
        response = post(served, path, **{**good, **fields, "stream": stream})
        assert response.status_code == status
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) > 20


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "\xff"}', 400),
        (b"{", 400),
        (b"", 400),
        (b" " * 10_000_000, 413),
    ],
)
def test_bad_bodies_are_refused(served: Served, body: bytes, status: int) -> None:
    response = httpx.post(f"{served.http}/v1/completions", content=body, timeout=60)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_large_body_without_a_length_is_refused_too(served: Served) -> None:
    def pieces() -> Any:
        for _ in range(60):
            yield b" " * 100_000

    response = httpx.post(f"{served.http}/v1/completions", content=pieces(), timeout=60)
    assert response.status_code == 413


def test_a_body_that_never_ends_is_answered_after_its_time(served: Served) -> None:
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        )
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 408
        assert json.loads(answer.read())["error"]["code"] == "request_timeout"


def test_unknown_paths_and_methods_are_answered_in_openais_format(served: Served) -> None:
    response = httpx.get(f"{served.http}/v1/embeddings", timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found_error")
    response = httpx.get(f"{served.http}/v1/completions", timeout=60)
    assert response.status_code == 405
    assert "error" in response.json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(served: Served, stream: bool) -> None:
    body = json.dumps(
        {"model": MODEL, "prompt": "long", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    ).encode()
    address = urlsplit(served.http)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        wait_until(lambda: served.metric("drafthouse_running_requests") == 1)
        wait_until(lambda: served.metric("drafthouse_kv_pages_in_use", role="target") > 0)
    wait_until(lambda: served.metric("drafthouse_running_requests") == 0)
    wait_until(lambda: served.metric("drafthouse_kv_pages_in_use") == 0)
    wait_until(lambda: served.metric("drafthouse_drafter_requests") == 0)
