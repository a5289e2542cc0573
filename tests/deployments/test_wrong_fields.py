"""Wrong bodies: the error names the field and the remedy, and repeats no prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from cluster.client import GenerateRequest, Grammar, SamplingOptions
from cluster.errors import NotFoundError, RequestError
from deployments.ingress.api.contract import PostEndpoint
from deployments.ingress.api.messages import MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.body import parse_body
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    Chat,
    CompletionBody,
)
from tests.deployments.test_contract import PARSERS, parse
from tests.deployments.test_openai_request import LIMITS, chat, completion, refused
from tests.deployments.test_tools import SERVED, TOOLS, tool

FORMS = ("json", "regex", "choice", "grammar", "structural_tag")
USER = {"role": "user", "content": "hello"}
BEAMS = {"use_beam_search": True, "n": 2}
# What is as good as nothing to Python says something all the same.
NOTHING: tuple[Any, ...] = (0, False, "", {})
OF_FORMS: dict[str, Sequence[Any]] = {
    **{f"structured_outputs.{form}": [0, 0.0, False] for form in FORMS},
    "structured_outputs.json_object": [0],
}
# By the path of the field that is wrong, which is the one that is named: values.  Types and bounds
# are in test_contract.py, test_error_places.py and test_number_fields.py.
VALUES: Mapping[PostEndpoint, Mapping[str, Sequence[Any]]] = {
    COMPLETIONS: {
        **OF_FORMS,
        "prompt": [
            *(None, "", [], [1, "a"], [1, True], [1.0], [[]], [100], [-1], {"text": "x"}),
            ["a"] * 9,
        ],
        "stop": [["a", "b", "c"], [""], 5],
        "logit_bias": [{"x": 1}, {"100": 1}, {"\u0661": 1}],
        "stream_options": [{"include_usage": True}],
        "user": [5],
        "metadata": [{"k" * 65: "v"}, {str(n): "v" for n in range(17)}],
        "cache_salt": ["", 1234567, ["s"], "1234567" * 100],
        "speculation.max_node": [1],
        "speculation.drafters": [["llm"]],
        "length_penalty": [2.0],
        "early_stopping": [True],
        "model": ["gpt-5", "", None, 5],
    },
    CHAT: {
        **OF_FORMS,
        "chat_template_kwargs.chat_template": ["x"],
        "chat_template_kwargs.unknown_key": [1],
        "chat_template_kwargs.tools": [[]],
        "tools": ["x", *NOTHING, [tool("a"), tool("a")]],
        "tool_choice": ["required"],
        "top_logprobs": [2],
        "max_completion_tokens": [0],
        "prompt": ["x"],
    },
    RESPONSES: {
        "tools": NOTHING,
        "tool_choice.type": ["allowed_tools"],
        "response_format.type": ["poem"],
    },
    TOKENIZE: {"prompt": [["x"]]},
    DETOKENIZE: {"tokens": ["x", [10**9]]},
    MESSAGES: {"tools": NOTHING},
}
FORMAT = {"type": "json_object"}
FUNCTION = {"type": "function", "name": "f"}
# Of a call: no object, a number that is none, and half a character.
ARGUMENTS = (0, False, [], "[1e400]", '{"\\ud83d": "\\ud83d"}')
# The field that is named, what else is sent, and words of the error.
CASES: Mapping[PostEndpoint, Sequence[tuple[Any, ...]]] = {
    COMPLETIONS: [
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("min_tokens", {"max_tokens": 0, "echo": True, "min_tokens": 3}),
        ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("stream_options.usage", {"stream": True, "stream_options": {"usage": True}}),
        ("temprature", {"temprature": 1}, "did you mean temperature"),
        ("stop", {**BEAMS, "stop": "a"}),
        ("stream", {**BEAMS, "stream": True}),
        ("min_tokens", {**BEAMS, "min_tokens": 2}),
        ("logprobs", {**BEAMS, "echo": True, "logprobs": 1}),
        *(
            (f"structured_outputs.{form}", {"structured_outputs": {form: ""}}, "empty; send a")
            for form in ("regex", "grammar")
        ),
    ],
    CHAT: [
        *(
            (f"messages[0]{below}", {"messages": [message]})
            for below, message in (
                (".role", {"role": "function", "content": "x"}),
                (".content", {"role": "tool"}),
                (".content", {"role": "assistant", "content": None}),
                (".content[0]", {"role": "user", "content": [{"type": "image_url"}]}),
                (".tool_calls", {**USER, "tool_calls": [1]}),
                (".tool_calls[0]", {"role": "assistant", "tool_calls": [1]}),
                (
                    ".tool_calls[0].function.name",
                    {"role": "assistant", "tool_calls": [{"function": {}}]},
                ),
                *(
                    (".tool_calls", {"role": "assistant", "content": "x", "tool_calls": value})
                    for value in NOTHING
                ),
                *(
                    (
                        ".tool_calls[0].function.arguments",
                        {
                            "role": "assistant",
                            "tool_calls": [{"function": {"name": "f", "arguments": value}}],
                        },
                    )
                    for value in ARGUMENTS
                ),
            )
        ),
        ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].function.strict", {"tools": [tool("a", strict="yes")]}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        (
            "tool_choice.function.name",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        ),
        ("response_format", {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}),
        (
            "structured_outputs.regex",
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        ),
        ("response_format.type", {"response_format": {"type": "poem"}}, "json_schema"),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}, "missing"),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "missing",
        ),
        ("response_format.typ", {"response_format": {"typ": "text"}}, "did you mean type"),
        (
            "response_format",
            {"structured_outputs": {"regex": "a"}, "response_format": FORMAT},
            "send one",
        ),
        *(
            ("structured_outputs" + below, {"structured_outputs": form}, words)
            for below, form, words in (
                ("", {"json": {}, "regex": "a"}, "one of them"),
                (".json", {"json": "{"}, "not valid JSON"),
                (".json", {"json": 5}, "JSON schema"),
                (".choice", {"choice": []}, "at least one"),
                (".regex", {"regex": 5}, "send a string"),
            )
        ),
    ],
    RESPONSES: [
        *(
            (
                "input[0].arguments",
                {
                    "input": [
                        {**FUNCTION, "type": "function_call", "call_id": "a", "arguments": value}
                    ]
                },
            )
            for value in ARGUMENTS
        ),
        ("text.format", {"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}}),
        (
            "tool_choice.name",
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
        ),
    ],
    MESSAGES: [
        *(
            (
                "messages[0].content[0].input",
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "content": [{"type": "tool_use", "name": "f", "input": value}],
                        }
                    ]
                },
            )
            for value in (0, False, [])
        ),
        ("tools[0].type", {"tools": [{"type": 5, "name": "bash"}]}),
    ],
}


def at(path: str, value: Any) -> dict[str, Any]:
    """An object with a value at a path."""
    name, _, below = path.partition(".")
    return {name: at(below, value) if below else value}


def wrong() -> Iterator[tuple[Any, ...]]:
    for endpoint, fields in VALUES.items():
        for param, values in fields.items():
            yield from ((endpoint, param, at(param, value)) for value in values)
    for endpoint, cases in CASES.items():
        yield from ((endpoint, *case) for case in cases)


@pytest.mark.parametrize("case", wrong(), ids=lambda case: f"{case[0].path} {case[1]}")
def test_an_error_names_the_field_and_the_remedy(case: tuple[Any, ...]) -> None:
    endpoint, param, fields, *words = case
    error = refused(parse, endpoint, {**PARSERS[endpoint][0], **fields}, SERVED)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert 400 <= error.http_status < 500
    assert len(error.message) < 300
    assert "1234567" not in error.message
    assert all(word in error.message for word in words)


@pytest.mark.parametrize(
    "name", ["gpt-5", "../x", "/etc/passwd", "demo/../../x", "demo\0", "~/x", "%2e%2e/x"]
)
def test_a_path_is_no_name_of_a_model(name: str) -> None:
    """Names are compared with those of the configuration, and nothing is looked for."""
    for error in (
        refused(Chat.parse, chat(model=name), LIMITS),
        refused(CompletionBody.parse, completion(model=name), LIMITS),
        refused(to_spec, GenerateRequest(model=name, text="hello"), LIMITS),
    ):
        assert isinstance(error, NotFoundError)
        assert "is not served; ask for 'demo'" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"text": "launch"}},
        {"prompt": ["launch", 5]},
        {"messages": [{"role": "user", "content": {"x": "launch"}}]},
    ],
)
def test_no_message_repeats_prompt_text(fields: dict[str, Any]) -> None:
    parse = Chat.parse if "messages" in fields else CompletionBody.parse
    assert "launch" not in refused(parse, {"model": "demo", **fields}, LIMITS).message


def test_fields_that_are_null_are_absent() -> None:
    nothing = {"tools": None, "structured_outputs": None, "response_format": None}
    asked = Chat.parse(chat(**nothing), LIMITS).spec
    assert dataclasses.replace(asked.params) == Chat.parse(chat(), LIMITS).spec.params
    assert asked.prompts[0].tools == ()


def with_grammar(kind: str, source: str) -> GenerateRequest:
    sampling = SamplingOptions(grammar=Grammar(kind=kind, source=source))
    return GenerateRequest(model="demo", text="x", sampling=sampling)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(
            (kind, source)
            for kind in ("choice", "json_schema", "structural_tag")
            for source in ("0", "false", "null", "", "[", "5", "1e400")
        ),
        *(("choice", source) for source in ("[]", "[0]", "{}")),
        ("regex", ""),
        ("grammar", ""),
        ("json_schema", '{"a":' * 500 + "{}" + "}" * 500),
    ],
)
def test_a_source_over_grpc_is_a_grammar_or_refused_by_its_name(kind: str, source: str) -> None:
    assert refused(to_spec, with_grammar(kind, source), LIMITS).param == "sampling.grammar.source"
