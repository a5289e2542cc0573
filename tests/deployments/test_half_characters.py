"""Half of a surrogate pair, which JSON can escape and UTF-8 cannot have, in what is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.deployments.server import MODEL, Server

FUNCTION = {"name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def http(tool_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tool_server.url, timeout=60) as client:
        yield client


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
