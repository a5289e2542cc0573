"""Calls that a stop string or a limit cuts off, answers that go back as a conversation, and calls
that are one text."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseCustomToolCallInputDeltaEvent,
    ResponseCustomToolCallInputDoneEvent,
)

from cluster.core import FinishReason, TokenLogprob
from cluster.text.prompt import ChatUse
from cluster.text.tool_calls.json_call import TextArgument
from deployments.ingress.api.response_request import Response
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import Chat
from deployments.ingress.openai_response import delta_fields, finish_reason, whole_message
from deployments.ingress.spec import GenerationSpec, Limits, ResponseStore
from tests.deployments.test_openai_request import LIMITS, chat
from tests.deployments.test_wrong_fields import LENIENT
from tests.support.text.answers import (
    ARGUMENTS,
    WRITTEN,
    Apis,
    asked,
    read_answer,
    read_text,
    response_writer,
    streamed,
)
from tests.support.text.tokenizers_for_tests import small_tokenizer

FORCED = ChatUse(reads_calls=True, is_forced=True)
HEAD = '<tool_call>\n{"name": "ci'
CUT = '<tool_call>\n{"name": "city", "arguments": {"name": "O'


def answer(text: str, **how: Any) -> list[Delta]:
    """The deltas of an answer in the format of Hermes that comes at once.  how: it is read."""
    tokenizer = small_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False).tolist()
    return read_answer(tokenizer, asked("hermes", **how), [tokens])


CALL, WHOLE = ['{"name": "O'], [ARGUMENTS]
CUTS = {
    "a call, by a stop string": (
        CUT + 'slo"}}',
        {"stop": ("slo", "erg")},
        ["", CALL, "stop", ["incomplete"], "incomplete", "stop_sequence"],
    ),
    "a call, by the end": (
        CUT,
        {},
        ["", CALL, "stop", ["incomplete"], "incomplete", "end_turn"],
    ),
    "a call, by a limit": (
        CUT,
        {"end": FinishReason.LENGTH},
        ["", CALL, "length", ["incomplete"], "incomplete", "max_tokens"],
    ),
    "behind whole calls": (
        WRITTEN["hermes"] + " more",
        {"stop": ("</tool_call>",)},
        ["", WHOLE, "tool_calls", ["completed"], "completed", "stop_sequence"],
    ),
    "the head of a forced call": (
        HEAD,
        {"use": FORCED},
        ["", [], "stop", ["incomplete"], "incomplete", "end_turn"],
    ),
    "the head of a forced call, by a limit": (
        HEAD,
        {"use": FORCED, "end": FinishReason.LENGTH},
        ["", [], "length", ["incomplete"], "incomplete", "max_tokens"],
    ),
    # The call before it is complete, though the answer is not.
    "the head of a second forced call": (
        f"{WRITTEN['hermes']}\n{HEAD}",
        {"use": FORCED},
        ["", WHOLE, "stop", ["completed"], "incomplete", "end_turn"],
    ),
    "a forced call that never began": (
        CUT,
        {"use": FORCED, "stop": ("<tool_call>",)},
        ["", [], "stop", ["incomplete"], "incomplete", "stop_sequence"],
    ),
    "the head of a call that nobody forced": (
        HEAD,
        {},
        [HEAD, [], "stop", ["completed"], "completed", "end_turn"],
    ),
}


@pytest.mark.parametrize(("text", "how", "expected"), CUTS.values(), ids=CUTS)
def test_what_is_cut_is_told_as_cut(text: str, how: dict[str, Any], expected: list[Any]):
    """Of the chat: content and calls, finish_reason; of the response: statuses; stop_reason."""
    deltas = answer(text, **how)
    whole = Apis().whole(deltas)
    assert Apis().streamed(deltas) == whole
    (content, _, calls), reason, (_, item_statuses, status), _, stop = whole
    arguments = [call["arguments"] for call in calls]
    assert [content, arguments, reason, item_statuses, status, stop] == expected


@pytest.mark.parametrize("name", [r"\q", r"\ud83d", "", "a b", "x" * 65])
def test_an_object_with_a_name_that_no_tool_has_stays_text(name: str):
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    whole = Apis().whole(answer(text))
    assert whole[:2] == [(text, "", []), "stop"]


def test_arguments_of_any_depth_are_told():
    written = '{"a": ' * 1500 + "1" + "}" * 1500
    text = f'<tool_call>{{"name": "city", "arguments": {written}}}</tool_call>'
    whole = Apis().whole(answer(text))
    assert whole[0] == ("", "", [{"name": "city", "arguments": written}])
    assert response_of(answer(text))["output"]


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity"])
def test_arguments_that_are_no_json_leave_a_message_valid(number: str):
    text = f'<tool_call>{{"name": "city", "arguments": {{"a": {number}}}}}</tool_call>'
    (_, _, calls), *_, blocks, _ = Apis().whole(answer(text))
    assert calls == [{"name": "city", "arguments": f'{{"a": {number}}}'}]
    assert blocks == [("tool_use", "city", {})]


def response_of(deltas: Sequence[Delta], limits: Limits = LIMITS, **more: Any) -> dict[str, Any]:
    return json.loads(response_writer(limits, **more).whole(deltas))


def test_logprobs_of_calls_and_reasoning_make_no_items():
    way = asked("hermes", is_reasoning=True)
    deltas = [
        replace(delta, logprobs=[TokenLogprob(-1.0)] * len(delta.token_ids))
        for delta in read_text(way, f"<think>hm</think>Yes.{CUT}")
    ]
    asks = {"include": ["message.output_text.logprobs"]}
    items = response_of(deltas, **asks)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    told = items[1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in told).endswith("Yes.")


def test_an_answer_with_a_cut_call_can_be_gone_on_with():
    """By its id or with its items, in a response or in a chat, the conversation is the same."""
    limits = replace(LIMITS, store=ResponseStore(4, 10**6))
    deltas = answer(CUT)
    answered = response_of(deltas, limits)
    (item,) = answered["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "what?"}
    user = {"role": "user", "content": "x"}

    def conversation(**body: Any) -> list[Any]:
        asked = Response.parse({"model": "demo", **body}, limits)
        return [dict(message) for message in asked.spec.prompts[0].messages or ()]

    by_id = conversation(previous_response_id=answered["id"], input=[result])
    assert conversation(input=[user, item, result]) == by_id
    assert by_id[1]["tool_calls"][0]["function"] == {"name": "city", "arguments": '{"name": "O'}
    message = {**whole_message(deltas)}
    message["tool_calls"][0]["id"] = item["call_id"]
    tool = {"role": "tool", "tool_call_id": item["call_id"], "content": "what?"}
    chat_prompt = Chat.parse(chat(messages=[user, message, tool]), LIMITS).spec.prompts[0]
    assert [dict(message) for message in chat_prompt.messages or ()] == by_id


@pytest.mark.parametrize("written", ["\\ud83d", "\\ud83d\\ude42", "\\ude42\\ud83d x"])
def test_an_answer_with_half_a_character_can_be_gone_on_with(written: str):
    limits = replace(LIMITS, store=ResponseStore(4, 10**6))
    text = f'<tool_call>{{"name": "city", "arguments": {{"name": "{written}"}}}}</tool_call>'
    answered = response_of(answer(text), limits)
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    body = {"model": "demo", "input": [result], "previous_response_id": answered["id"]}
    _, said, _ = Response.parse(body, limits).spec.prompts[0].messages or ()
    (call,) = said["tool_calls"]
    told = call["function"]["arguments"]["name"]
    assert told == json.loads(f'"{written}"').encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )


# Tools whose calls are one text: how models know them, and how their calls come back.
PATCH = '*** Begin\n+é "東京" 🙂\\d\t/\n*** End'
GRAMMAR = {"syntax": "lark", "definition": 'start: "x"'}
FLAT = {"type": "custom", "name": "patch", "description": "d"}
OF_CHAT = {"type": "custom", "custom": {"name": "patch", "description": "d"}}


def flat_spec(tool: dict[str, Any], **fields: Any) -> GenerationSpec:
    body = {"model": "demo", "input": "x", "tools": [tool], **fields}
    return Response.parse(body, LENIENT).spec


def chat_spec(tool: dict[str, Any], **fields: Any) -> GenerationSpec:
    return Chat.parse(chat(tools=[tool], **fields), LENIENT).spec


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
    assert spec.prompts[0].use.custom == {"patch"}
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


PATCHED = json.dumps({"input": PATCH}, ensure_ascii=False)
# What a model may write, and the text that is meant.
MEANT = [
    (PATCHED, PATCH),
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


@pytest.mark.parametrize(("written", "text"), MEANT)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_the_text_is_that_of_the_arguments_in_any_pieces(written: str, text: str, size: int):
    reader = TextArgument()
    ends = range(0, len(written), size)
    pieces = [reader.push(written[at : at + size], is_end=at == ends[-1]) for at in ends]
    assert "".join(pieces) == text
    if text == PATCH and size == 1:
        assert sum(map(bool, pieces)) > len(PATCH) / 2
    assert reader.push("", is_end=True) == ""


def patching() -> list[Delta]:
    """Text, a call of the custom tool and one of a function, by tokens."""
    use = ChatUse(reads_calls=True, custom=frozenset({"patch"}))
    way = asked("hermes", use=use)
    text = f'I do.<tool_call>\n{{"name": "patch", "arguments": {PATCHED}}}\n</tool_call>'
    text += '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    return read_text(way, text)


def test_a_chat_has_the_call_in_its_own_shape():
    deltas = patching()
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


def test_a_response_has_the_call_in_its_own_shape():
    store = ResponseStore(4, 10**6)
    limits = replace(LIMITS, store=store)
    deltas = patching()
    whole = json.loads(response_writer(limits).whole(deltas))
    item = ResponseCustomToolCall.model_validate(whole["output"][1])
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", PATCH)
    assert [each["type"] for each in whole["output"]] == [
        "message",
        "custom_tool_call",
        "function_call",
    ]
    (_, kept) = store.get("resp_1", "", "x").messages
    assert kept["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": PATCH}}

    told = streamed(response_writer(limits), deltas)
    own = [event for event in told if "custom_tool_call_input" in event["type"]]
    *grown, done = own
    texts = [ResponseCustomToolCallInputDeltaEvent.model_validate(one).delta for one in grown]
    assert "".join(texts) == PATCH
    assert ResponseCustomToolCallInputDoneEvent.model_validate(done).input == PATCH
    ended = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert ended[1]["input"] == PATCH
