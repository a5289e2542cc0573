"""Half of a surrogate pair, which JSON can escape and UTF-8 cannot have, in what is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.deployments.server import MODEL, Server

HALF = "\ud83d"
HELLO = {"role": "user", "content": "Go."}
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.fixture(scope="module")
def http(tool_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    # Escaped: httpx itself would write what is no character.
    return http.post(path, content=json.dumps({"model": MODEL, **body}))


def with_call(**more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function, **more}
    said = {"role": "assistant", "tool_calls": [call]}
    return {"messages": [HELLO, said, {"role": "tool", "tool_call_id": "c", "content": "4"}]}


def with_arguments(arguments: Any) -> dict[str, Any]:
    return with_call(function={"name": "weather", "arguments": arguments})


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
CUSTOM = {"name": "weather", "input_schema": {"type": "object", "description": HALF}}
USE = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": HALF}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", with_arguments('{"a": "\\ud83d"}'), ARGUMENTS),
    ("/v1/chat/completions", with_arguments('{"\\ud83d": 1}'), ARGUMENTS),
    ("/v1/chat/completions", with_arguments({"a": [HALF]}), ARGUMENTS),
    ("/tokenize", with_arguments('{"a": "\\udc00"}'), ARGUMENTS),
    ("/v1/chat/completions", with_call(id=HALF), "messages[1].tool_calls[0]"),
    (
        "/v1/chat/completions",
        {
            "messages": [HELLO],
            "tools": [
                {
                    "type": "function",
                    "function": {**FUNCTION, "parameters": {"properties": {HALF: {}}}},
                }
            ],
        },
        "tools[0].function.parameters",
    ),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "function", **FUNCTION, "parameters": {"a": HALF}}]},
        "tools[0].parameters",
    ),
    ("/v1/chat/completions", {"messages": [{**HELLO, "content": HALF}]}, "messages[0].content"),
    ("/v1/completions", {"prompt": HALF}, "prompt"),
    (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": {"const": HALF}}},
        "structured_outputs.json",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"json": '{"const": "\\ud83d"}'}},
        "structured_outputs.json",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"choice": [HALF]}},
        "structured_outputs.choice",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_half_a_character_is_refused_by_the_name_of_its_field(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(http, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "half of a surrogate pair" in error["message"]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [HELLO], "tools": [CUSTOM]}, "tools[0].input_schema"),
        (
            {"messages": [HELLO, {"role": "assistant", "content": [USE]}]},
            "messages[1].content[0].input",
        ),
    ],
)
def test_messages_and_their_counts_name_it_too(
    http: httpx.Client, body: dict[str, Any], place: str
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        more = {"max_tokens": 2} if path == "/v1/messages" else {}
        answer = post(http, path, {**more, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{place}: contains half")


@pytest.mark.parametrize("written", ["\\ud83d", "\\ud83d\\ude42", "\\ude42\\ud83d x"])
def test_an_answer_with_half_a_character_can_be_gone_on_with(
    http: httpx.Client, written: str
) -> None:
    arguments = f'{{"city": "{written}"}}'
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    body = {
        "model": MODEL,
        "input": "x",
        "temperature": 0,
        "max_output_tokens": 150,
        "tools": [{"type": "function", **FUNCTION}],
        "structured_outputs": {"choice": [text]},
    }
    answer = http.post("/v1/responses", content=json.dumps(body)).json()
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    more = {"model": MODEL, "input": [result], "previous_response_id": answer["id"]}
    later = http.post("/v1/responses", json={**more, "max_output_tokens": 1})
    assert later.status_code == 200, later.text
    # The call is still in the conversation.
    alone = http.post(
        "/v1/responses", json={"model": MODEL, "input": "x", "max_output_tokens": 1}
    ).json()
    used = later.json()["usage"]["input_tokens"] - alone["usage"]["input_tokens"]
    assert used > 40
