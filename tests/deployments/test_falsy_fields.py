"""What a field says where its value is as good as nothing to Python: 0, false, an empty text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.rpc.generation import GenerationRequest, SamplingOptions
from deployments.ingress.api.messages import AnthropicMessages
from deployments.ingress.api.response_request import Response
from deployments.ingress.api.response_store import ResponseStore
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, Completion
from tests.deployments.test_openai_request import LIMITS, chat, completion

FORMS = ("json", "regex", "choice", "grammar", "structural_tag")
HELLO = [{"role": "user", "content": "hello"}]


def refusal(parse: Any, *arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*arguments)
    return caught.value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_no_form_of_a_grammar_is_dropped(form: str, value: Any) -> None:
    asked = {"structured_outputs": {form: value}}
    for parse, body in ((Chat.parse, chat(**asked)), (Completion.parse, completion(**asked))):
        assert refusal(parse, body, LIMITS).param == f"structured_outputs.{form}"


@pytest.mark.parametrize("form", FORMS)
def test_a_form_that_is_null_is_absent(form: str) -> None:
    asked = chat(structured_outputs={form: None, "json_object": False})
    assert Chat.parse(asked, LIMITS).spec.params.grammar is None


def test_json_object_is_true_or_false() -> None:
    body = chat(structured_outputs={"json_object": 0})
    assert refusal(Chat.parse, body, LIMITS).param == "structured_outputs.json_object"


@pytest.mark.parametrize("form", ["regex", "grammar"])
def test_an_empty_text_is_told_to_be_empty(form: str) -> None:
    error = refusal(Completion.parse, completion(structured_outputs={form: ""}), LIMITS)
    assert error.message.startswith(f"structured_outputs.{form}: empty; send a")


def with_grammar(kind: str, source: str) -> GenerationRequest:
    sampling = SamplingOptions(grammar=GrammarSpec(kind, source))
    return GenerationRequest("demo", "x", sampling=sampling)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(
            (kind, source)
            for kind in ("choice", "json_schema", "structural_tag")
            for source in ("0", "false", "null", "", "[", "5", "1e400")
        ),
        ("choice", "[]"),
        ("choice", "[0]"),
        ("choice", "{}"),
        ("regex", ""),
        ("grammar", ""),
        ("json_schema", '{"a":' * 500 + "{}" + "}" * 500),
    ],
)
def test_a_source_over_grpc_is_a_grammar_or_refused_by_its_name(kind: str, source: str) -> None:
    assert refusal(to_spec, with_grammar(kind, source), LIMITS).param == "sampling.grammar.source"


def test_a_grammar_over_grpc_is_that_of_http() -> None:
    spec = to_spec(with_grammar("choice", '["b", "a", "b"]'), LIMITS)
    asked = completion(structured_outputs={"choice": ["b", "a", "b"]})
    assert spec.params.grammar == Completion.parse(asked, LIMITS).spec.params.grammar
    assert spec.params.grammar == GrammarSpec("choice", '["b","a"]')


def in_responses(body: dict[str, Any]) -> Any:
    return Response.parse({"model": "demo", **body}, LIMITS, ResponseStore(1, 1000))


def in_messages(body: dict[str, Any]) -> Any:
    return AnthropicMessages.parse({"model": "demo", "max_tokens": 1, **body}, LIMITS)


@pytest.mark.parametrize("value", [0, False, "", {}])
def test_tools_are_a_list(value: Any) -> None:
    assert refusal(Chat.parse, chat(tools=value), LIMITS).param == "tools"
    assert refusal(in_responses, {"input": "x", "tools": value}).param == "tools"
    assert refusal(in_messages, {"messages": HELLO, "tools": value}).param == "tools"


@pytest.mark.parametrize("value", [0, False, "", {}])
def test_calls_of_an_earlier_answer_are_a_list(value: Any) -> None:
    said = {"role": "assistant", "content": "x", "tool_calls": value}
    error = refusal(Chat.parse, chat(messages=[*HELLO, said]), LIMITS)
    assert error.param == "messages[1].tool_calls"


@pytest.mark.parametrize("value", [0, False, []])
def test_arguments_of_calls_are_objects(value: Any) -> None:
    function = {"name": "f", "arguments": value}
    said = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    error = refusal(Chat.parse, chat(messages=[*HELLO, said]), LIMITS)
    assert error.param == "messages[1].tool_calls[0].function.arguments"
    call = {"type": "function_call", "call_id": "a", **function}
    assert "arguments" in refusal(in_responses, {"input": [call]}).message
    use = {"type": "tool_use", "id": "a", "name": "f", "input": value}
    said = {"role": "assistant", "content": [use]}
    error = refusal(in_messages, {"messages": [*HELLO, said]})
    assert error.param == "messages[1].content[0].input"


def test_what_generates_nothing_cannot_have_a_least_length() -> None:
    asked = completion(max_tokens=0, echo=True, min_tokens=3)
    assert refusal(Completion.parse, asked, LIMITS).param == "min_tokens"


def test_a_body_without_those_fields_is_as_before() -> None:
    plain = Chat.parse(chat(), LIMITS).spec
    nothing = {"tools": None, "structured_outputs": None, "response_format": None}
    asked = Chat.parse(chat(**nothing), LIMITS).spec
    assert dataclasses.replace(asked.params) == plain.params
    assert asked.prompts[0].tools == ()
