"""Tools and reasoning of chats: what requests may say, and how answers are read."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.grammar.json_schema import lenient
from cluster.requests.fields import GrammarSpec
from cluster.text.dialect import FORMATS, Dialect, ReasoningMarkers
from cluster.text.prompt import ChatUse
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import Chat
from deployments.ingress.openai_response import finish_reason, whole_message
from tests.deployments.test_openai_request import LIMITS, chat
from tests.support.errors import request_error
from tests.support.grammar.specs import eos, ids_of, open_text
from tests.support.text.answers import asked as reading
from tests.support.text.answers import read_text

MARKERS = ReasoningMarkers("<think>", "</think>", (7,), (8,))
DIALECT = Dialect(FORMATS["hermes"], MARKERS, template="{{ tools }} {{ reasoning_effort }}")
SERVED = replace(LIMITS, dialect=DIALECT)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "d", "parameters": SCHEMA, **more}
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("time")]
NAMED = {"type": "function", "function": {"name": "time"}}


def asked(**fields: Any) -> Chat:
    return Chat.parse(chat(**fields), SERVED)


def grammar_of(request: Chat) -> dict[str, Any] | None:
    grammar = request.spec.params.grammar
    if grammar is None:
        return None
    assert grammar.kind == "structural_tag"
    return json.loads(grammar.source)["format"]


def test_tools_reach_the_template_and_leave_the_text_free():
    for fields in ({}, {"tool_choice": "auto"}):
        request = asked(tools=TOOLS, **fields)
        assert list(request.spec.prompts[0].tools) == TOOLS
        assert grammar_of(request) is None
        assert request.spec.prompts[0].use.reads_calls


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {}])
def test_without_a_choice_there_are_no_calls(fields: dict[str, Any]):
    request = asked(**fields)
    assert request.spec.prompts[0].tools == ()
    assert not request.spec.prompts[0].use.reads_calls


def test_a_forced_call_is_held_to_its_schema():
    required = grammar_of(asked(tools=TOOLS, tool_choice="required"))
    assert required["type"] == "tags_with_separator"
    assert required["at_least_one"]
    assert not required["stop_after_first"]
    held = lenient(SCHEMA)  # no tool is strict
    assert [each["content"]["json_schema"] for each in required["tags"]] == [held, held]
    one = grammar_of(asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))
    assert one["stop_after_first"]
    named = grammar_of(asked(tools=TOOLS, tool_choice=NAMED))
    assert named["stop_after_first"]
    assert [each["begin"] for each in named["tags"]] == [
        '<tool_call>\n{"name": "time", "arguments": '
    ]


def test_strict_tools_hold_the_calls_that_the_model_chooses():
    found = grammar_of(asked(tools=[tool("weather", strict=True), tool("time")]))
    assert found["type"] == "triggered_tags"
    schemas = [each["content"]["json_schema"] for each in found["tags"]]
    assert schemas == [SCHEMA, {"type": "object"}]


FORM = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORM}}


def matches(request: Chat, text: str) -> bool:
    """Whether the answer may be this text."""
    output = open_text(request.spec.params.grammar)
    return all(map(output.push, [*ids_of(text), *eos()]))


@pytest.mark.parametrize("tools", [TOOLS, [tool("weather", strict=True), tool("time")]])
def test_a_form_leaves_the_way_to_a_call_open(tools: list[Any]):
    request = asked(tools=tools, response_format=AS_SCHEMA)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for text in ('{"t": "x"}', call, f"{call}\n{call}"):
        assert matches(request, text)
    for text in ("Hello", '{"u": 1}', f'{{"t": "x"}}{call}', call.replace("weather", "unknown")):
        assert not matches(request, text)
    assert matches(request, call.replace("city", "x")) == (tools is TOOLS)
    one = asked(tools=tools, response_format=AS_SCHEMA, parallel_tool_calls=False)
    assert matches(one, call)
    assert not matches(one, f"{call}\n{call}")
    # What is said in vLLM's words holds the whole answer.
    held = asked(tools=TOOLS, structured_outputs={"json": FORM})
    assert not matches(held, call)


@pytest.mark.parametrize("parameters", [{}, None, {"properties": {"a": {"type": "integer"}}}])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_arguments_are_an_object_whatever_a_tool_says_of_them(parameters: Any, choice: str):
    function = tool("go", parameters=parameters, strict=choice == "auto")
    if parameters is None:
        del function["function"]["parameters"]
    request = asked(tools=[function], tool_choice=choice)
    told = request.spec.prompts[0].tools[0]["function"]["parameters"]
    assert told == (parameters or {"type": "object", "properties": {}})
    call = '<tool_call>\n{"name": "go", "arguments": %s}\n</tool_call>'
    assert matches(request, call % "{}")
    for other in ("5", '"x"', "[]", "null"):
        assert not matches(request, call % other)


def test_tools_are_refused_where_the_template_has_none():
    with request_error(r"no known format.*answers\.tool_parser"):
        Chat.parse(chat(tools=TOOLS), LIMITS)
    with request_error("chat template does not use it"):
        Chat.parse(chat(reasoning_effort="low"), LIMITS)


def test_models_that_answer_in_channels_are_not_forced():
    dialect = Dialect(FORMATS["harmony"], MARKERS, is_harmony=True, template="tools")
    limits = replace(LIMITS, dialect=dialect)
    Chat.parse(chat(tools=TOOLS), limits)
    with request_error("in channels"):
        Chat.parse(chat(tools=TOOLS, tool_choice="required"), limits)


def test_reasoning_effort_reaches_the_template():
    arguments = asked(reasoning_effort="low").spec.prompts[0].arguments
    assert arguments == {"reasoning_effort": "low"}


TEXT = (
    '<think>hm</think>Yes.<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


def answer(use: ChatUse | None) -> list[Delta]:
    return read_text(reading("hermes", is_reasoning=True, use=use), TEXT)


def test_an_answer_has_its_calls_and_reasoning_beside_its_text():
    parts = answer(ChatUse(reads_calls=True))
    message = whole_message(parts)
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == "hm"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "time", "arguments": '{"a": 1}'},
        {"name": "weather", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert finish_reason(parts[-1]) == "tool_calls"
    assert finish_reason(parts[0]) is None


def test_what_is_not_wanted_is_left_out():
    one = whole_message(answer(ChatUse(reads_calls=True, is_parallel=False)))
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["time"]
    silent = whole_message(answer(ChatUse(reads_calls=True, shows_reasoning=False)))
    assert "reasoning_content" not in silent
    parts = answer(ChatUse())
    assert whole_message(parts)["content"].startswith("Yes.<tool_call>")
    assert finish_reason(parts[-1]) == "stop"
    assert whole_message(answer(None))["content"] == TEXT


def test_the_grammar_begins_after_the_reasoning():
    spec = GrammarSpec("regex", "a")
    assert DIALECT.held_to(None, [1]) is None
    free = DIALECT.held_to(spec, [1])
    assert free == replace(spec, reasoning_start=(7,), reasoning_end=(8,))
    begun = DIALECT.held_to(spec, [1, 7])
    assert begun == replace(spec, reasoning_end=(8,))
    assert DIALECT.held_to(spec, [7, 8]) == spec
    assert Dialect().held_to(spec, [7]) == spec


def test_special_tokens_are_shown_where_markers_are_such():
    assert not DIALECT.shows_specials(with_calls=True)
    special = replace(DIALECT, special_texts=frozenset({"<tool_call>"}))
    assert special.shows_specials(with_calls=True)
    assert not special.shows_specials(with_calls=False)
    assert not Dialect().shows_specials(with_calls=True)
