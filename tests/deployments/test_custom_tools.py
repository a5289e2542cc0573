"""Tools whose calls are one text: how models know them, and how their calls come back."""

import dataclasses
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
)

from cluster.core import FinishReason
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.json_call import TextArgument
from deployments.ingress.api.response_request import Response
from deployments.ingress.api.response_store import ResponseStore
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import Chat
from deployments.ingress.openai_response import delta_fields, finish_reason, whole_message
from deployments.ingress.spec import ChatUse, GenerationSpec
from tests.deployments.test_openai_request import LIMITS, chat
from tests.deployments.test_wrong_fields import LENIENT as SERVED
from tests.support.text.answers import asked, read_text, response_writer, streamed

PATCH = '*** Begin\n+é "東京" 🙂\\d\t/\n*** End'
GRAMMAR = {"syntax": "lark", "definition": 'start: "x"'}
FLAT = {"type": "custom", "name": "patch", "description": "d"}
OF_CHAT = {"type": "custom", "custom": {"name": "patch", "description": "d"}}


def flat_spec(tool: dict[str, Any], **fields: Any) -> GenerationSpec:
    body = {"model": "demo", "input": "x", "tools": [tool], **fields}
    spec: GenerationSpec = Response.parse(body, SERVED).spec
    return spec


def chat_spec(tool: dict[str, Any], **fields: Any) -> GenerationSpec:
    return Chat.parse(chat(tools=[tool], **fields), SERVED).spec


OF_GRAMMAR = {"format": {"type": "grammar", "grammar": GRAMMAR}}


@pytest.mark.parametrize(
    "spec",
    [
        flat_spec({**FLAT, "format": {"type": "grammar", **GRAMMAR}}),
        chat_spec(
            {"type": "custom", "custom": {"name": "patch", "description": "d", **OF_GRAMMAR}}
        ),
    ],
)
def test_a_model_knows_it_as_a_function_of_one_text(spec: GenerationSpec):
    (tool,) = spec.prompts[0].tools
    function = tool["function"]
    told = (tool["type"], function["name"], function["description"])
    assert told == ("function", "patch", "d")
    schema = function["parameters"]
    assert schema["required"] == ["input"]
    assert GRAMMAR["definition"] in schema["properties"]["input"]["description"]
    assert spec.chat.custom == {"patch"}
    assert spec.params.grammar is None


@pytest.mark.parametrize(
    "spec",
    [
        flat_spec(FLAT, tool_choice={"type": "custom", "name": "patch"}),
        flat_spec(FLAT, tool_choice="required"),
        chat_spec(OF_CHAT, tool_choice={"type": "custom", "custom": {"name": "patch"}}),
    ],
)
def test_a_forced_call_has_one_text(spec: GenerationSpec):
    (tag,) = json.loads(spec.params.grammar.source)["format"]["tags"]
    assert tag["content"]["json_schema"]["properties"]["input"]["type"] == "string"
    assert tag["content"]["json_schema"]["additionalProperties"] is False


WRITTEN = json.dumps({"input": PATCH}, ensure_ascii=False)
# What a model may write, and the text that is meant.
ARGUMENTS: list[tuple[str, str]] = [
    (WRITTEN, PATCH),
    (json.dumps({"input": PATCH}), PATCH),
    (f' {{ "patch"\n: {json.dumps(PATCH)} , "more": [1] }}', PATCH),
    ('{"input": ""}', ""),
    ('{"input": "raw\nline"}', "raw\nline"),
    ('{"input": "\\ud83d\\u0041 \\ud83d!"}', "\ud83dA \ud83d!"),
    # An escape that is none is passed on, and so is what is no object with a text.
    ('{"input": "a\\d+"}', "a\\d+"),
    ('{"input": 5}', '{"input": 5}'),
    ("{}", "{}"),
]


@pytest.mark.parametrize(("written", "text"), ARGUMENTS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_the_text_is_that_of_the_arguments_in_any_pieces(written: str, text: str, size: int):
    reader = TextArgument()
    ends = range(0, len(written), size)
    pieces = [reader.push(written[at : at + size], is_end=at == ends[-1]) for at in ends]
    assert "".join(pieces) == text
    if text == PATCH and size == 1:
        assert sum(map(bool, pieces)) > len(PATCH) / 2
    assert reader.push("", is_end=True) == ""


def answer(tokenizer: Tokenizer, *, end: FinishReason = FinishReason.STOP) -> list[Delta]:
    """Text, a call of the custom tool and one of a function, by tokens."""
    use = ChatUse(reads_calls=True, custom=frozenset({"patch"}))
    way = asked("hermes", use=use, end=end)
    text = f'I do.<tool_call>\n{{"name": "patch", "arguments": {WRITTEN}}}\n</tool_call>'
    text += '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    return read_text(tokenizer, way, text)


def test_a_chat_has_the_call_in_its_own_shape(tokenizer: Tokenizer):
    deltas = answer(tokenizer)
    custom, function = whole_message(deltas)["tool_calls"]
    call = ChatCompletionMessageCustomToolCall.model_validate(custom)
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", PATCH)
    assert function["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert finish_reason(deltas[-1]) == "tool_calls"
    pieces = [piece for one in deltas for piece in delta_fields(one).get("tool_calls", ())]
    own = [piece for piece in pieces if piece["index"] == 0]
    assert (own[0]["type"], own[0]["custom"]["name"]) == ("custom", "patch")
    assert "".join(piece["custom"]["input"] for piece in own) == PATCH
    assert not any("function" in piece for piece in own)


def test_a_response_has_the_call_in_its_own_shape(tokenizer: Tokenizer):
    store = ResponseStore(4, 10**6)
    limits = dataclasses.replace(LIMITS, store=store)
    deltas = answer(tokenizer)
    whole = json.loads(response_writer(tokenizer, limits).whole(deltas))
    item = ResponseCustomToolCall.model_validate(whole["output"][1])
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", PATCH)
    assert [each["type"] for each in whole["output"]] == [
        "message",
        "custom_tool_call",
        "function_call",
    ]
    (_, kept) = store.get("resp_1", "", "x").messages
    assert kept["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": PATCH}}

    told = streamed(response_writer(tokenizer, limits), deltas)
    own = [event for event in told if "custom_tool_call_input" in event["type"]]
    *grown, done = own
    texts = [ResponseCustomToolCallInputDeltaEvent.model_validate(one).delta for one in grown]
    assert "".join(texts) == PATCH
    assert ResponseCustomToolCallInputDoneEvent.model_validate(done).input == PATCH
    ended = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert ended[1]["input"] == PATCH
