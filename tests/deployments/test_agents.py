"""What coding agents were recorded to ask is answered, in the default configuration."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.config.schema import Config
from tests.support.agents.corpus import Recorded, recorded
from tests.support.agents.plan import AGENTS, LAST, MODEL, call
from tests.support.agents.written import WritingTarget, chat_folder
from tests.support.choices import by_day
from tests.support.deployments.api import events
from tests.support.deployments.scripted import Scripted, scripted

# By day one or two of each agent: the first, and one with results of tools.
REQUESTS = [
    pytest.param(request, id=f"{agent.name}-{number}")
    for agent in AGENTS
    for number, request in list(enumerate(recorded(agent.name), start=1))[:: by_day(3, 1)]
]
# The longest prompts leave less than the 32,000 tokens that several agents always ask for.
ROOM = {"max_context_len": 49152, "max_batch_tokens": 49152}
ARGUMENTS = {"city": "Århus", "lines": ["a\n", '"b"']}


def write(prompt: str) -> str:
    """A call of the first tool that is offered; without one, a text."""
    offered = re.search(r'<tools>\n\{"type": "function", "function": \{"name": "(\w+)"', prompt)
    return LAST if offered is None else call(offered[1], **ARGUMENTS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = chat_folder(tmp_path_factory.mktemp("agents"))
    with scripted(folder, Config(model_name=MODEL), WritingTarget(folder, write), **ROOM) as site:
        yield site


def first_tool(body: Any) -> str:
    tools = [each for each in body.get("tools", ()) if each.get("type") in (None, "function")]
    return str({**tools[0], **tools[0].get("function", {})}["name"]) if tools else ""


def chat(answer: httpx.Response) -> tuple[str, str, str]:
    """Text, name of the call and arguments of an answer of /v1/chat/completions."""
    is_whole = answer.headers["content-type"] == "application/json"
    messages = [
        choice["message" if is_whole else "delta"]
        for event in ([answer.json()] if is_whole else events(answer.text))
        for choice in event["choices"]
    ]
    assert is_whole or answer.text.endswith("data: [DONE]\n\n")
    functions = [one["function"] for each in messages for one in each.get("tool_calls") or ()]
    return (
        "".join(each.get("content") or "" for each in messages),
        "".join(each.get("name") or "" for each in functions),
        "".join(each.get("arguments") or "" for each in functions),
    )


def message(answer: httpx.Response) -> tuple[str, str, str]:
    """The same of /v1/messages."""
    found = events(answer.text)
    assert found[-1] == {"type": "message_stop"}
    blocks = [each["content_block"] for each in found if each["type"] == "content_block_start"]
    deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    return (
        "".join(each.get("text", "") for each in deltas),
        "".join(each.get("name", "") for each in blocks),
        "".join(each.get("partial_json", "") for each in deltas),
    )


def response(answer: httpx.Response) -> tuple[str, str, str]:
    """The same of /v1/responses."""
    last = events(answer.text)[-1]
    assert last["type"] == "response.completed"
    parts = [part for item in last["response"]["output"] for part in item.get("content", ())]
    functions = [item for item in last["response"]["output"] if item["type"] == "function_call"]
    return (
        "".join(part["text"] for part in parts),
        "".join(each["name"] for each in functions),
        "".join(each["arguments"] for each in functions),
    )


READ = {"/v1/chat/completions": chat, "/v1/messages": message, "/v1/responses": response}


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_a_coding_agent_asks_is_answered(server: Scripted, request_: Recorded):
    answer = httpx.post(
        server.url + request_.path,
        headers={**request_.headers, "accept-encoding": "identity"},
        content=json.dumps(request_.body),
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    text, name, arguments = READ[request_.path.partition("?")[0]](answer)
    assert name == first_tool(request_.body)
    if name:
        assert (text, json.loads(arguments)) == ("", ARGUMENTS)
    else:
        assert text == LAST
