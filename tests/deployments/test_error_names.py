"""An error names the field of the body that it is about, whatever else is made of that body."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.requests.fields import GrammarSpec
from cluster.rpc.generation import ChatMessage, GenerationRequest, SamplingOptions
from deployments.ingress.fields import Names
from deployments.ingress.grpc_request import prompt_of, to_spec
from tests.deployments.test_openai_request import LIMITS, refused
from tests.deployments.test_wrong_fields import at
from tests.support.deployments.server import Server

USER: Any = {"role": "user", "content": "hi"}
BAD_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "poem"}}}
LONG = "word " * 9000
CALL: Any = {"type": "function", "function": {"name": "f", "arguments": "[1e400]"}}
TOOL: Any = {"name": "f", "strict": True}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1]},
}

Case = tuple[str, dict[str, Any], str]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "name": "a", "schema": schema}


COUNTED: dict[str, list[Any]] = {
    "system": [5],
    "tool_choice.type": ["some"],
    "thinking.type": ["hard"],
    "output_config.effort": ["utmost"],
}
# By the path of the field that is wrong: values.
VALUES: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [LONG],
        "structured_outputs.regex": ["(a"],
        "structured_outputs.grammar": ["start: b"],
        "structured_outputs.json": [BAD_SCHEMA],
    },
    "/v1/chat/completions": {
        "structured_outputs.regex": ["(a"],
        "response_format": [{"type": "structural_tag", "format": 5}],
        "prediction": ["text"],
    },
    "/tokenize": {"prompt": ["x"]},
    "/detokenize": {"tokens": ["x", [10**9]]},
    "/v1/responses": {
        "input": [None, "", [], LONG],
        "include": [[5]],
        "previous_response_id": ["resp_none"],
        "text.format.type": ["yaml"],
        "response_format.type": ["poem"],
        "structured_outputs.regex": ["(a"],
        "tool_choice.type": ["allowed_tools"],
        "reasoning.effort": ["utmost"],
    },
    "/v1/messages/count_tokens": COUNTED,
    "/v1/messages": {**COUNTED, "stop_sequences": [[""], ["a"] * 99]},
}
ALONE: list[Case] = [
    (path, at(param, value), param)
    for path, fields in VALUES.items()
    for param, values in fields.items()
    for value in values
]
COMPLETIONS: list[Case] = [
    ("/v1/completions",
     {"response_format": {"type": "json_schema", "json_schema": {"name": "a",
                                                                 "schema": BAD_SCHEMA}}},
     "response_format.json_schema.schema"),
]  # fmt: skip
CHATS: list[Case] = [
    *(("/v1/chat/completions", fields, param) for fields, param in (
        ({"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"tool_choice": "required",
          "tools": [{"type": "function", "function": {**TOOL, "parameters": BAD_SCHEMA}}]},
         "tools"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"},
          "tools": [{"type": "function", "function": TOOL}]}, "structured_outputs.regex"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}},
         "prediction.content[0].text"),
    )),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/tokenize", {"messages": [USER], "tools": [{"type": 5}]}, "tools[0].type"),
    ("/tokenize", {"messages": None}, "prompt"),
    ("/tokenize", {"messages": None, "prompt": ["x"]}, "prompt"),
    ("/tokenize", {"messages": None, "prompt": "x" * 99_000}, "prompt"),
]  # fmt: skip
RESPONSES: list[Case] = [("/v1/responses", fields, param) for fields, param in (
    ({"tools": [{"type": 5}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"instructions": LONG}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
     "input[0].content[0].text"),
    ({"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}, "input[1].content"),
    ({"input": [{"type": "reasoning"}, {"role": "wizard", "content": "x"}],
      "instructions": "Be brief."}, "input[1].role"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "b", "name": "f", "arguments": "[1e400]"}]},
     "input[2].arguments"),
    ({"input": [USER, {"type": "function_call", "call_id": "a", "arguments": "{}"}]},
     "input[1].name"),
    ({"input": [USER, {"type": "function_call_output", "call_id": 5, "output": "x"}]},
     "input[1].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": "text"}]}]},
     "input[0].output[0].text"),
    ({"text": {"format": form(BAD_SCHEMA)}}, "text.format.schema"),
    ({"text": {"format": form(5)}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
     "text.format"),
    ({"tool_choice": "required", "tools": [{"type": "function", **TOOL,
                                            "parameters": BAD_SCHEMA}]}, "tools"),
    ({"tools": [{"type": "function", **TOOL, "parameters": 5}]}, "tools[0].parameters"),
    ({"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "g"}},
     "tool_choice.name"),
)]  # fmt: skip
_CONVERSATIONS: list[tuple[dict[str, Any], str]] = [
    ({"system": [{"type": "text"}]}, "system[0].text"),
    ({"system": "s", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    ({"system": "s", "messages": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"},
                                     {"type": "image"}]}]}, "messages[0].content[1]"),
    ({"messages": [USER, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": 5}]}]}, "messages[1].content[0].tool_use_id"),
    ({"messages": [USER, {"role": "user", "content": [
        {"type": "tool_result", "content": [{"type": "text"}]}]}]},
     "messages[1].content[0].content[0].text"),
    ({"messages": [USER, {"role": "assistant", "content": [
        {"type": "thinking"}, {"type": "tool_use", "input": {}}]}]},
     "messages[1].content[1].name"),
    ({"tools": [{"type": 5, "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
]  # fmt: skip
MESSAGES: list[Case] = [
    *((path, fields, param) for path in ("/v1/messages", "/v1/messages/count_tokens")
      for fields, param in _CONVERSATIONS),
    *(("/v1/messages", fields, param) for fields, param in (
        ({"output_config": {"format": {"type": "json_schema", "schema": BAD_SCHEMA}}},
         "output_config.format.schema"),
        ({"tools": [{"name": "f", "input_schema": BAD_SCHEMA}], "tool_choice": {"type": "any"}},
         "tools"),
    )),
]  # fmt: skip

CASES = [*ALONE, *COMPLETIONS, *CHATS, *RESPONSES, *MESSAGES]


@pytest.mark.parametrize(("path", "fields", "param"), CASES)
def test_an_error_names_the_field_of_its_own_body(
    tool_server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    error = tool_server.refusal(path, **{**BASES[path], **fields})
    if "param" in error:  # Anthropic's errors have none
        assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


# Where each body has its prompt, a short one, and what bounds its output.
PLACES: dict[str, tuple[str, Any, str]] = {
    "/v1/completions": ("prompt", lambda text: text, "max_tokens"),
    "/v1/chat/completions": ("messages", lambda text: [{**USER, "content": text}], "max_tokens"),
    "/v1/responses": ("input", lambda text: text, "max_output_tokens"),
    "/v1/messages": ("messages", lambda text: [{**USER, "content": text}], "max_tokens"),
}
CONTEXT = 512
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")


@pytest.mark.parametrize("path", [*PLACES, "tokens"])
@pytest.mark.parametrize("streams", [False, True])
# By its tokens, and by its characters alone.
@pytest.mark.parametrize("count", [CONTEXT, 9_000])
def test_a_full_context_has_the_code_that_clients_act_on(
    tool_server: Server, path: str, streams: bool, count: int
) -> None:
    path, by_tokens = ("/v1/completions", True) if path == "tokens" else (path, False)
    own, said, length = PLACES[path]
    prompt = [5] * count if by_tokens else said("word " * count)
    body = {own: prompt, length: 4, "stream": streams}
    if path == "/v1/responses" and streams:
        # OpenAI's own agent reads the code in the event alone.
        first, *_, last = tool_server.stream(path, **body)
        assert (first["type"], last["type"]) == ("response.created", "response.failed")
        error = {**last["response"]["error"], "type": "invalid_request_error"}
    else:
        error = tool_server.refusal(path, **body)
    assert error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        found = TOO_LONG.match(error["message"])
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        found = TOO_LONG.search(error["message"])
        assert error.get("param", own) == own
    assert found is not None
    assert int(found[1]) > int(found[2]) == CONTEXT - 1


@pytest.mark.parametrize("path", PLACES)
def test_more_output_than_fits_is_as_much_as_fits(tool_server: Server, path: str) -> None:
    own, said, length = PLACES[path]
    body = {own: said("hello"), length: 2**31 - 1, "temperature": 0}
    usage = tool_server.ask(path, **body)["usage"]
    assert 0 < usage.get("completion_tokens", usage.get("output_tokens")) < CONTEXT


def test_as_many_of_a_prompts_tokens_are_kept_as_fit_beside_an_output_that_never_could(
    server: Server,
) -> None:
    asked = {"prompt": [5] * 600, "truncate_prompt_tokens": -1, "max_tokens": 10_000}
    assert server.ask("/v1/completions", **asked)["usage"]["prompt_tokens"] == CONTEXT - 1


def test_only_the_name_in_front_is_the_bodys_own() -> None:
    names = Names({"messages": "input", "messages[1]": "input[4]", "stop": "stop_sequences"})
    with (
        pytest.raises(RequestError) as caught,
        names.told(),
    ):
        raise RequestError("messages[1].role: messages stop: here", param="messages[1].role")
    assert caught.value.param == "input[4].role"
    assert caught.value.message == "input[4].role: messages stop: here"
    assert names.of("stop_token_ids") == "stop_token_ids"
    assert names.of("messages[10].content") == "input[10].content"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (SamplingOptions(temperature=9.0), "sampling.temperature"),
        (SamplingOptions(max_tokens=0), "sampling.max_tokens"),
        (SamplingOptions(stop=("",)), "sampling.stop"),
        (SamplingOptions(logit_bias={999: 1.0}), "sampling.logit_bias"),
        (SamplingOptions(grammar=GrammarSpec("poem", "x")), "sampling.grammar.kind"),
        (SamplingOptions(grammar=GrammarSpec("choice", "[")), "sampling.grammar.source"),
        (SamplingOptions(grammar=GrammarSpec("json_schema", "5")), "sampling.grammar.source"),
    ],
)
def test_a_call_names_the_field_of_its_message(options: SamplingOptions, param: str) -> None:
    error = refused(to_spec, GenerationRequest("demo", "x", sampling=options), LIMITS)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


def test_what_a_call_turns_out_to_lack_later_has_its_messages_name() -> None:
    grammar = SamplingOptions(grammar=GrammarSpec("regex", "(a"))
    names = to_spec(GenerationRequest("demo", "x", sampling=grammar), LIMITS).names
    known = ("grammar", "prompt", "max_tokens")
    assert [names.of(name) for name in known] == [
        "sampling.grammar.source",
        "text",
        "sampling.max_tokens",
    ]
    assert prompt_of(np.array([1], np.int32), LIMITS).names.of("prompt") == "tokens"
    chat = (ChatMessage("user", "x"), ChatMessage("function", "x"))
    assert refused(prompt_of, chat, LIMITS).param == "chat.messages[1].role"
    assert prompt_of(chat[:1], LIMITS).names.of("messages[0].role") == "chat.messages[0].role"


@pytest.mark.parametrize(
    ("input_", "said"),
    [
        ([{"type": "item_reference"}], "send messages, function_call and function_call_output"),
        ([{"role": "function", "content": "x"}], "the older form of tool"),
    ],
)
def test_words_of_a_message_stay_as_they_are(server: Server, input_: Any, said: str) -> None:
    assert said in server.refusal("/v1/responses", input=input_)["message"]
