"""Calls that a stop string or a limit cuts off, and answers that go back as a conversation."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.core import FinishReason, TokenLogprob
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.api.response_request import Response
from deployments.ingress.api.response_store import ResponseStore
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import Chat
from deployments.ingress.openai_response import whole_message
from deployments.ingress.spec import ChatUse, Limits
from tests.deployments.test_openai_request import LIMITS, chat
from tests.support.text.answers import (
    ARGUMENTS,
    WRITTEN,
    Apis,
    Asked,
    asked,
    read_answer,
    response_writer,
)

FORCED = ChatUse(reads_calls=True, is_forced=True)
HEAD = '<tool_call>\n{"name": "ci'
CUT = '<tool_call>\n{"name": "city", "arguments": {"name": "O'


def answer(tokenizer: Tokenizer, text: str, way: Asked) -> list[Delta]:
    return read_answer(tokenizer, way, [tokenizer.encode(text, add_special_tokens=False).tolist()])


CALL, WHOLE = ['{"name": "O'], [ARGUMENTS]
CUTS: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
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
def test_what_is_cut_is_told_as_cut(
    tokenizer: Tokenizer, text: str, how: dict[str, Any], expected: list[Any]
):
    """Of the chat: content and calls, finish_reason; of the response: statuses; stop_reason."""
    deltas = answer(tokenizer, text, asked("hermes", **how))
    whole = Apis(tokenizer).whole(deltas)
    assert Apis(tokenizer).streamed(deltas) == whole
    (content, _, calls), reason, (_, item_statuses, status), _, stop = whole
    arguments = [call["arguments"] for call in calls]
    assert [content, arguments, reason, item_statuses, status, stop] == expected


@pytest.mark.parametrize("name", [r"\q", r"\ud83d", "", "a b", "x" * 65])
def test_an_object_with_a_name_that_no_tool_has_stays_text(tokenizer: Tokenizer, name: str):
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    whole = Apis(tokenizer).whole(answer(tokenizer, text, asked("hermes")))
    assert whole[:2] == [(text, "", []), "stop"]


def test_arguments_of_any_depth_are_told(tokenizer: Tokenizer):
    written = '{"a": ' * 1500 + "1" + "}" * 1500
    text = f'<tool_call>{{"name": "city", "arguments": {written}}}</tool_call>'
    whole = Apis(tokenizer).whole(answer(tokenizer, text, asked("hermes")))
    assert whole[0] == ("", "", [{"name": "city", "arguments": written}])
    assert response_of(tokenizer, answer(tokenizer, text, asked("hermes")))["output"]


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity"])
def test_arguments_that_are_no_json_leave_a_message_valid(tokenizer: Tokenizer, number: str):
    text = f'<tool_call>{{"name": "city", "arguments": {{"a": {number}}}}}</tool_call>'
    (_, _, calls), *_, blocks, _ = Apis(tokenizer).whole(answer(tokenizer, text, asked("hermes")))
    assert calls == [{"name": "city", "arguments": f'{{"a": {number}}}'}]
    assert blocks == [("tool_use", "city", {})]


def response_of(
    tokenizer: Tokenizer, deltas: Sequence[Delta], limits: Limits = LIMITS, **more: Any
) -> dict[str, Any]:
    return dict(json.loads(response_writer(tokenizer, limits, **more).whole(deltas)))


def test_logprobs_of_calls_and_reasoning_make_no_items(tokenizer: Tokenizer):
    way = asked("hermes", is_reasoning=True)
    tokens = tokenizer.encode(f"<think>hm</think>Yes.{CUT}", add_special_tokens=False).tolist()
    deltas = [
        dataclasses.replace(delta, logprobs=[TokenLogprob(-1.0)] * len(delta.token_ids))
        for delta in read_answer(tokenizer, way, [[token] for token in tokens])
    ]
    asks = {"include": ["message.output_text.logprobs"]}
    items = response_of(tokenizer, deltas, **asks)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    told = items[1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in told).endswith("Yes.")


def test_an_answer_with_a_cut_call_can_be_gone_on_with(tokenizer: Tokenizer):
    """By its id or with its items, in a response or in a chat, the conversation is the same."""
    limits = dataclasses.replace(LIMITS, store=ResponseStore(4, 10**6))
    deltas = answer(tokenizer, CUT, asked("hermes"))
    answered = response_of(tokenizer, deltas, limits)
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
def test_an_answer_with_half_a_character_can_be_gone_on_with(tokenizer: Tokenizer, written: str):
    limits = dataclasses.replace(LIMITS, store=ResponseStore(4, 10**6))
    text = f'<tool_call>{{"name": "city", "arguments": {{"name": "{written}"}}}}</tool_call>'
    answered = response_of(tokenizer, answer(tokenizer, text, asked("hermes")), limits)
    result = {"type": "function_call_output", "call_id": "c", "output": "4"}
    body = {"model": "demo", "input": [result], "previous_response_id": answered["id"]}
    _, said, _ = Response.parse(body, limits).spec.prompts[0].messages or ()
    (call,) = said["tool_calls"]
    told = call["function"]["arguments"]["name"]
    assert told == json.loads(f'"{written}"').encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )
