"""Bodies that are nested deep, on every endpoint: refused before anybody walks through them."""

import json
import logging
from typing import Any

import httpx
import pytest

from cluster.text.json_text import MAX_DEPTH
from tests.support.deployments.server import MODEL

HELLO = {"role": "user", "content": "Go."}


def deep(depth: int, *, is_list: bool = False) -> Any:
    value = {}
    for _ in range(depth - 1):
        value = [value] if is_list else {"a": value}
    return value


def with_schema(value: Any) -> dict[str, dict[str, Any]]:
    """A body of each endpoint with `value` where a schema may stand."""
    tool = {"name": "f", "parameters": value}
    messages = {"messages": [HELLO], "max_tokens": 1}
    custom = {"tools": [{"name": "f", "input_schema": value}]}
    return {
        "/v1/completions": {"prompt": "x", "structured_outputs": {"json": value}},
        "/v1/chat/completions": {**messages, "tools": [{"type": "function", "function": tool}]},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", **tool}]},
        "/v1/messages": {**messages, **custom},
        "/v1/messages/count_tokens": {"messages": [HELLO], **custom},
        "/tokenize": {"messages": [HELLO], "chat_template_kwargs": {"x": value}},
        "/detokenize": {"tokens": value},
    }


PATHS = tuple(with_schema({}))
PATH = PATHS[0]


@pytest.mark.parametrize("is_list", [False, True])
def test_what_is_too_deep_is_refused_in_few_lines(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, is_list: bool
):
    caplog.set_level(logging.INFO)
    for depth in (MAX_DEPTH, 500, 900):
        body = {"model": MODEL, **with_schema(deep(depth, is_list=is_list))[PATH]}
        response = http.post(PATH, json=body)
        assert response.status_code == 400
        assert "nested too deeply" in response.json()["error"]["message"]
    own = [one for one in caplog.text.splitlines() if "httpx" not in one]
    assert len(own) < 30


@pytest.mark.parametrize("path", PATHS)
def test_what_is_just_not_too_deep_is_no_fault_of_ours(http: httpx.Client, path: str):
    # The tool's schema begins five levels down.
    body = {"model": MODEL, **with_schema(deep(MAX_DEPTH - 5))[path]}
    response = http.post(path, json=body)
    assert response.status_code < 500, response.text
    assert "nested too deeply" not in response.text


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 50_000])
def test_a_text_of_json_in_a_body_is_bounded_too(http: httpx.Client, depth: int):
    text = '{"a":' * depth + "{}" + "}" * depth
    function = {"name": "f", "arguments": text}
    call = {"id": "a", "type": "function", "function": function}
    said = {"messages": [HELLO, {"role": "assistant", "tool_calls": [call]}]}
    item = {"type": "function_call", "call_id": "a", **function}
    arguments = "messages[1].tool_calls[0].function.arguments"
    for path, param, body in (
        ("/v1/chat/completions", arguments, said),
        ("/tokenize", arguments, said),
        ("/v1/responses", "input[0].arguments", {"input": [item]}),
        (PATH, "structured_outputs.json", with_schema(text)[PATH]),
    ):
        response = http.post(path, json={"model": MODEL, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert "nested too deeply" in response.json()["error"]["message"]


def test_arguments_at_the_limit_are_rendered(http: httpx.Client):
    text = json.dumps(deep(MAX_DEPTH))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    body = {"model": MODEL, "messages": [HELLO, {"role": "assistant", "tool_calls": [call]}, HELLO]}
    assert http.post("/tokenize", json=body).status_code == 200
