"""Tools, reasoning and structured output of /v1/responses and /v1/messages, with their clients."""

import json
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from cluster.core import FinishReason
from cluster.text.tool_calls.base import Part
from deployments.ingress.choice import Delta
from tests.support.deployments.server import MODEL, Server
from tests.support.text.answers import Apis

# Enough for the tiny model to end a call: it may write nothing else.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "how is the weather?"}
FUNCTION = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}

TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
# One call: the tiny model would go on calling.
ANY = {"type": "any", "disable_parallel_tool_use": True}
SEEDED = {"temperature": 0.8, "seed": 3}


@pytest.fixture
def responses(tool_server: Server) -> Any:
    client = openai.OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="x", timeout=120, max_retries=0
    )
    return client.responses


@pytest.fixture
def messages(tool_server: Server) -> Any:
    client = anthropic.Anthropic(base_url=tool_server.url, api_key="x", timeout=120, max_retries=0)
    return client.messages


def response(**more: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": "how is the weather?", "max_output_tokens": 120}
    return {**asked, "extra_body": SEEDED, **more}


def message(**more: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [USER], "max_tokens": 120, "extra_body": SEEDED}
    return {**asked, **more}


def test_openais_helper_puts_a_streamed_call_together(responses: Any):
    asked = response(tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False)
    whole = responses.create(**asked)
    with responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    (call,), (expected,) = last.output, whole.output
    assert (call.name, call.arguments) == ("weather", expected.arguments)
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert (whole.status, [tool.name for tool in whole.tools]) == ("completed", ["weather"])
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_anthropics_helper_puts_a_streamed_call_together(messages: Any):
    asked = message(tools=[TOOL], tool_choice=ANY)
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    (block,), (expected,) = last.content, whole.content
    assert (block.name, block.input) == ("weather", expected.input)
    jsonschema.validate(block.input, SCHEMA)
    assert last.stop_reason == "tool_use"
    assert kinds[:2] == ["message_start", "content_block_start"]
    # What was called and what came of it are told again.
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    used = {
        "role": "assistant",
        "content": [block.model_dump(include={"type", "id", "name", "input"})],
    }
    turns = [USER, used, {"role": "user", "content": [result]}]
    assert messages.create(**message(messages=turns, tools=[TOOL])).content


def test_tools_are_tokenised_as_a_chat_with_them_is(tool_server: Server):
    function = {"name": "weather", "parameters": SCHEMA}
    said = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    tokens = tool_server.ask("/tokenize", **said)["tokens"]
    asked = {**said, "max_tokens": 1, "return_token_ids": True}
    assert tool_server.ask("/v1/chat/completions", **asked)["prompt_token_ids"] == tokens


def called(text: str, *piece: Any) -> Delta:
    return Delta(0, Part(text, "function", *piece), has_calls=True)


# The tiny model does not reason: what a reasoning model's answer is read as, written by hand.
DELTAS = [
    Delta(0, Part("Let me", "reasoning")),
    Delta(0, Part(" see.", "reasoning")),
    Delta(0, Part("I ask.")),
    called("", 0, "weather"),
    called('{"city":', 0),
    called('"Rome"}', 0, None, True),
    called("{}", 1, "time", True),
    Delta(0, finish_reason=FinishReason.STOP, has_calls=True),
]


def test_reasoning_text_and_calls_stay_in_order():
    whole = Apis().whole(DELTAS)
    assert Apis().streamed(DELTAS) == whole
    (content, reasoning, _), _, (items, *_), blocks, _ = whole
    assert (content, reasoning) == ("I ask.", "Let me see.")
    kinds = [kind for kind, *_ in items]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert items[2][1:] == ("weather", '{"city":"Rome"}')
    assert blocks == [
        ("thinking", None, "Let me see."),
        ("text", None, "I ask."),
        ("tool_use", "weather", {"city": "Rome"}),
        ("tool_use", "time", {}),
    ]
