"""Whatever is wrong at one place of a body, the error names that place, on every endpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cluster.errors import RequestError
from deployments.ingress.api.contract import PostEndpoint
from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.openai_request import CHAT, COMPLETIONS, TOKENIZE
from tests.deployments.test_contract import parse
from tests.deployments.test_tools import SERVED

ANY = {"type": "object"}
FUNCTION = {"name": "f", "description": "d", "parameters": ANY}
COMMON: dict[str, Any] = {
    "model": "demo",
    "temperature": 1,
    "top_p": 0.5,
    "seed": 1,
    "metadata": {"task": "x"},
    "speculation": {"enabled": True, "drafters": ["lm"], "max_draft_tokens": 2},
}
MORE: dict[str, Any] = {
    **COMMON,
    "stop": ["a"],
    "min_tokens": 1,
    "logit_bias": {"1": 1},
    "cache_salt": "a",
}


def part(kind: str, text: str) -> dict[str, str]:
    return {"type": kind, "text": text}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}


CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [part("text", "a"), part("text", "b")]},
    {"role": "assistant", "content": "t", "tool_calls": [call("a"), call("b")]},
    {"role": "tool", "tool_call_id": "a", "content": "x"},
    {"role": "tool", "tool_call_id": "b", "content": [part("text", "y")]},
]
TOOLS = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in "fg"]
ITEMS = [
    {"type": "reasoning", "summary": []},
    {"role": "user", "content": [part("input_text", "a"), part("input_text", "b")]},
    {"type": "message", "role": "assistant", "content": [part("output_text", "b")]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
    {"type": "function_call_output", "call_id": "b", "output": [part("input_text", "y")]},
    {"role": "user", "content": "z"},
]
BLOCKS = [
    {"role": "user", "content": [part("text", "a")]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x"},
            part("text", "b"),
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "b", "name": "f", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "x"},
            {"type": "tool_result", "tool_use_id": "b", "content": [part("text", "y")]},
            part("text", "more"),
        ],
    },
]
COUNTED: dict[str, Any] = {
    "model": "demo",
    "system": [part("text", "s")],
    "messages": BLOCKS,
    "tools": [{"name": "f", "description": "d", "input_schema": ANY}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "low"},
}
BODIES: Mapping[PostEndpoint, dict[str, Any]] = {
    COMPLETIONS: {
        **MORE,
        "prompt": ["a", "b"],
        "max_tokens": 3,
        "n": 2,
        "logprobs": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANY}},
    },
    CHAT: {
        **MORE,
        "messages": CONVERSATION,
        "tools": TOOLS,
        "max_completion_tokens": 9,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logprobs": True,
        "top_logprobs": 1,
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": [part("text", "x")]},
    },
    RESPONSES: {
        **MORE,
        "instructions": "i",
        "input": ITEMS,
        "tool_choice": "auto",
        "tools": [{"type": "function", **FUNCTION}],
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": ANY}},
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
    },
    MESSAGES: {**COMMON, **COUNTED, "max_tokens": 5, "stop_sequences": ["a"]},
    COUNT_TOKENS: COUNTED,
    TOKENIZE: {"messages": CONVERSATION, "tools": TOOLS, "add_special_tokens": True},
}
WRONG: tuple[Any, ...] = (5, -1, True, "x", "", [], {}, [5], [""], [{}], {"type": "x"}, 1e300, None)
# A field that only makes sense with another one may be named for it.
TOGETHER = {("tools", "tool_choice"), ("logprobs", "top_logprobs"), ("messages", "prompt")}


def places(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every path in a body, with the object or list that has it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        yield name, value, key
        if isinstance(inner, dict | list):
            yield from places(inner, name)


def top(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def is_near(param: str, path: str) -> bool:
    """Whether one is within the other, or a sibling of it in the same object."""
    around = path.rpartition(".")[0]
    return (
        param.startswith(path)
        or path.startswith(param)
        or bool(around and param.startswith(around))
        or (top(path), top(param)) in TOGETHER
    )


def answers(endpoint: PostEndpoint, *wrong: Any) -> Iterator[tuple[str, RequestError | None]]:
    """What each wrong value at each place is answered with; None where it is taken."""
    for number, (path, *_) in enumerate(places(BODIES[endpoint])):
        for value in wrong:
            body = json.loads(json.dumps(BODIES[endpoint]))  # nothing of it is there twice
            _, holder, key = list(places(body))[number]
            holder[key] = value
            try:
                parse(endpoint, body, SERVED)
            except RequestError as error:
                yield path, error
            else:
                yield path, None


ENDPOINTS = pytest.mark.parametrize("endpoint", BODIES, ids=lambda endpoint: endpoint.path)


@ENDPOINTS
def test_an_error_names_the_place_that_is_wrong(endpoint: PostEndpoint) -> None:
    """For some value of each place exactly that, or the list of texts that it is in, or what an
    object lacks: the name of a function."""
    parse(endpoint, BODIES[endpoint], SERVED)
    named: dict[str, set[str]] = defaultdict(set)
    for path, error in answers(endpoint, *WRONG):
        if error is not None:
            param = error.param or ""
            assert is_near(param, path), (path, error.message)
            assert error.message.startswith(f"{param}: ")
            named[path].add(param)
    assert len(named) > 25
    for path, params in named.items():
        owner = path.rpartition("[")[0] if path.endswith("]") else f"{path}.name"
        assert params & {path, owner}, path
