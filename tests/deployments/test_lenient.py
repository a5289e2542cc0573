"""What clients always send and what changes nothing: ignored by name, and refused where strict."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cluster.client import GenerateRequest
from cluster.errors import RequestError
from cluster.text.dialect import Dialect
from cluster.text.tool_calls.registry import FORMATS
from deployments.ingress.api.contract import PostEndpoint
from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import CHAT
from tests.deployments.test_contract import PARSERS, parse
from tests.deployments.test_openai_request import LENIENT as PLAIN
from tests.deployments.test_openai_request import LIMITS, refused
from tests.deployments.test_wrong_fields import at

STRICT = dataclasses.replace(LIMITS, dialect=Dialect(FORMATS["hermes"], template="{{ tools }}"))
LENIENT = dataclasses.replace(STRICT, config=PLAIN.config)
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OF_CHAT = {"type": "function", "function": {"name": "f"}}
OF_MESSAGES = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}

HOSTED = ("web_search", "local_shell", "image_generation")
# By the path of the field that has no effect: its value.
ALONE: Mapping[PostEndpoint, Mapping[str, Any]] = {
    MESSAGES: {
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config.effort": "max",
        "output_config.task_budget": {"type": "tokens", "total": 9},
    },
    COUNT_TOKENS: {"context_management": {"edits": []}},
    RESPONSES: {
        "client_metadata": {"x": "1"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "reasoning.summary": "auto",
        "reasoning.effort": "medium",
        "text.verbosity": "low",
        "truncation": "auto",
        "context_management": [{"type": "compaction"}],
    },
    CHAT: {
        "reasoning_effort": "high",
        "chat_template_kwargs.enable_thinking": False,
        "chat_template_kwargs.a b": 1,
        "enable_thinking": False,
        "thinking": {"type": "enabled"},
        "verbosity": "low",
        "web_search_options": {},
        "stream_options": {"include_usage": True},
    },
}
# What is ignored by a strict server, too.
HARMLESS = ("text.verbosity", "reasoning.summary")
# A body's fields, and those that have no effect.
CASES: list[tuple[PostEndpoint, dict[str, Any], Sequence[str]]] = [
    *(
        (endpoint, at(path, value), [path])
        for endpoint, fields in ALONE.items()
        for path, value in fields.items()
    ),
    (
        MESSAGES,
        {
            "mcp_servers": [{"type": "url", "url": "https://x"}],
            "tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}],
        },
        ["mcp_servers", "tools[].mcp_toolset"],
    ),
    (
        MESSAGES,
        {
            "tools": [
                OF_MESSAGES,
                {"type": "web_search_20250305", "name": "web_search"},
                {"type": "bash_20250124", "name": "bash"},
            ]
        },
        ["tools[].defer_loading", "tools[].web_search_20250305", "tools[].bash_20250124"],
    ),
    (
        COUNT_TOKENS,
        {"tools": [{"type": "text_editor_20250728", "name": "edit"}]},
        ["tools[].text_editor_20250728"],
    ),
    (
        RESPONSES,
        {"tools": [{"type": "namespace", "tools": [FUNCTION]}, FUNCTION]},
        ["tools[].namespace"],
    ),
    (
        RESPONSES,
        {"tools": [{"type": kind, "external_web_access": True} for kind in HOSTED]},
        [f"tools[].{kind}" for kind in HOSTED],
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "web_search_call", "id": "w", "action": {"query": "x"}},
            ]
        },
        ["input[].web_search_call"],
    ),
    (
        CHAT,
        {"tools": [{"type": "web_search"}, OF_CHAT], "tool_choice": "required"},
        ["tools[].web_search"],
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "id": "1", "annotations": []}]},
        ["messages[].id"],
    ),
]


@pytest.mark.parametrize(("endpoint", "fields", "names"), CASES)
def test_what_changes_nothing_is_ignored_and_named(
    endpoint: PostEndpoint, fields: dict[str, Any], names: Sequence[str]
) -> None:
    body = {**PARSERS[endpoint][0], **fields}
    assert set(names) <= set(parse(endpoint, body, LENIENT).ignored)
    if names[0] not in HARMLESS:
        with pytest.raises(RequestError):
            parse(endpoint, body, STRICT)


REFUSED: list[tuple[PostEndpoint, dict[str, Any], str]] = [
    (CHAT, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [OF_CHAT], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    (CHAT, {"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function"),
    (CHAT, {"tools": [None]}, "tools[0]"),
    (CHAT, {"tools": [{"type": 5}]}, "tools[0].type"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    (
        RESPONSES,
        {"tools": [{"type": "local_shell"}, {"type": "function", "name": "a b"}]},
        "tools[1].name",
    ),
    (
        RESPONSES,
        {"tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "g"}},
        "tool_choice.name",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (
        MESSAGES,
        {
            "tools": [{"type": "bash_20250124", "name": "bash"}],
            "tool_choice": {"type": "tool", "name": "bash"},
        },
        "tool_choice.name",
    ),
    (
        MESSAGES,
        {"tools": [OF_MESSAGES], "tool_choice": {"type": "tool", "name": "bash"}},
        "tool_choice.name",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("endpoint", "fields", "param"), REFUSED)
def test_what_would_change_the_answer_is_refused_however_lenient(
    endpoint: PostEndpoint, fields: dict[str, Any], param: str
) -> None:
    assert refused(parse, endpoint, {**PARSERS[endpoint][0], **fields}, LENIENT).param == param


def said(endpoint: PostEndpoint, **fields: Any) -> Sequence[Any]:
    """The conversation, as the template gets it."""
    (prompt,) = parse(endpoint, {**PARSERS[endpoint][0], **fields}, LENIENT).spec.prompts
    assert prompt.messages is not None
    return list(prompt.messages)


def called(name: str, arguments: Any, call_id: str = "c") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "c"}


USER = {"role": "user", "content": "x"}


def test_reasoning_has_two_names_and_an_answer_may_be_nothing_else() -> None:
    for name in ("reasoning", "reasoning_content"):
        turns = [USER, {"role": "assistant", "content": None, name: "hm"}, USER]
        told = {"role": "assistant", "content": "", "reasoning_content": "hm"}
        assert said(CHAT, messages=turns)[1] == told


def test_calls_and_outputs_of_every_kind_of_tool_are_a_conversation() -> None:
    items = [
        {"type": "message", **USER},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "é"}'},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "1"}, {"type": "output_text", "text": "2"}],
        },
        {"type": "custom_tool_call", "id": "i", "call_id": "c", "name": "patch", "input": "*** é"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {
            "type": "local_shell_call",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "call_id": "c", "output": "a.py"},
        {"type": "tool_search_call", "call_id": None, "arguments": {}},
        {"role": "developer", "content": [{"type": "input_text", "text": "y"}]},
    ]
    assert said(RESPONSES, input=items) == [
        USER,
        called("f", {"a": "é"}),
        result("1\n2"),
        called("patch", {"input": "*** é"}),
        result("done"),
        called("local_shell", {"type": "exec", "command": ["ls"]}),
        result("a.py"),
        {"role": "developer", "content": "y"},
    ]


def test_blocks_that_say_something_in_words_are_told_and_those_of_other_servers_are_not() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    document = {"type": "document", "source": {"type": "text", "data": "A page."}, **cached}
    parts = {
        "type": "document",
        "source": {"type": "content", "content": [{"type": "text", "text": "Part."}]},
    }
    found = {
        "type": "search_result",
        "source": "u",
        "title": "t",
        "content": [{"type": "text", "text": "Found."}],
    }
    reference = {"type": "tool_reference", "tool_name": "edit"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x", **cached}, document, parts]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}, **cached},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "is_error": False,
                    **cached,
                    "content": [{"type": "text", "text": "ok"}, found, reference, document],
                }
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Do."}]
    assert said(MESSAGES, messages=turns, system=system) == [
        {"role": "system", "content": "Be brief.\nDo."},
        {"role": "user", "content": "x\nA page.\nPart."},
        called("f", {}),
        result("ok\nFound.\nedit\nA page."),
    ]
    hosted = [{"role": "user", "content": [{"type": "web_search_tool_result"}]}]
    with pytest.raises(RequestError, match="web_search_tool_result"):
        parse(MESSAGES, {**PARSERS[MESSAGES][0], "messages": hosted}, STRICT)


def test_the_older_name_of_a_form_holds_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    body = {**PARSERS[MESSAGES][0], "output_format": form}
    newer = {**PARSERS[MESSAGES][0], "output_config": {"format": form}}
    grammar = parse(MESSAGES, body, LENIENT).spec.params.grammar
    assert grammar == parse(MESSAGES, newer, LENIENT).spec.params.grammar is not None


def test_a_call_over_grpc_needs_no_model_where_one_is_served() -> None:
    assert to_spec(GenerateRequest(text="x"), LENIENT).adapter == ""
    for limits in (STRICT, dataclasses.replace(LENIENT, adapters={"poems": "poems"})):
        with pytest.raises(RequestError, match="model"):
            to_spec(GenerateRequest(text="x"), limits)
