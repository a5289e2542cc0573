"""Wrong OpenAI bodies: the error names the field, and repeats no prompt."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import NotFoundError, RequestError, surface_of
from cluster.rpc.codec_generation import REQUEST, decode_request
from cluster.rpc.generation import GenerationRequest
from deployments.ingress.body import parse_body
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, Completion
from tests.deployments.test_openai_request import LIMITS, chat, completion

# Beside types and bounds: test_contract.py has those of every field.
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [100]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": "half \ud800 pair"}, "prompt"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**200}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"stop": ["a", "b", "c"]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [100]}, "stop_token_ids"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"suffix": "x"}, "suffix"),
    ({"user": 5}, "user"),
    ({"metadata": {"task": 5}}, "metadata.task"),
    ({"speculation": {"max_node": 1}}, "speculation.max_node"),
    ({"speculation": {"enabled": 1}}, "speculation.enabled"),
    ({"speculation": {"drafters": ["llm"]}}, "speculation.drafters"),
    ({"speculation": {"latency_class": "urgent"}}, "speculation.latency_class"),
    ({"speculation": {"latency_class": 4}}, "speculation.latency_class"),
    ({"speculation": {"min_tokens_per_s": 60}}, "speculation.min_tokens_per_s"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
def test_a_bad_completion_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Completion.parse(completion(**fields), LIMITS)
    assert caught.value.param == param
    assert 400 <= surface_of(caught.value).http_status < 500
    assert len(caught.value.message) < 300


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]},
        "messages[0].tool_calls[0]",
    ),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "poem"}}, "response_format.type"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
def test_a_bad_chat_request_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Chat.parse(chat(**fields), LIMITS)
    assert caught.value.param == param


@pytest.mark.parametrize("model", ["gpt-5", "", None, 5])
def test_another_model_is_refused(model: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Completion.parse(completion(model=model), LIMITS)
    assert caught.value.param == "model"


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="'gpt-5' is not served; ask for 'demo'"):
        Chat.parse(chat(model="gpt-5"), LIMITS)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "demo/../../x", "demo\0", "~/x", "%2e%2e/x"]
)
def test_a_path_is_no_name_of_a_model(name: str) -> None:
    """Names are compared with those of the configuration, and nothing is looked for."""
    carried = decode_request(REQUEST.encode(GenerationRequest(name, "hello")))
    for parse in (
        lambda: Chat.parse(chat(model=name), LIMITS),
        lambda: Completion.parse(completion(model=name), LIMITS),
        lambda: to_spec(carried, LIMITS),
    ):
        with pytest.raises(NotFoundError, match="is not served; ask for 'demo'"):
            parse()


def test_a_misspelt_field_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(RequestError, match="did you mean temperature"):
        Completion.parse(completion(temprature=1), LIMITS)


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


def test_no_message_repeats_prompt_text() -> None:
    secret = "the launch code is 0000"
    bad: list[dict[str, Any]] = [
        {"prompt": {"text": secret}},
        {"prompt": [secret, 5]},
        {"messages": [{"role": "user", "content": {"x": secret}}]},
    ]
    for fields in bad:
        parse = Chat.parse if "messages" in fields else Completion.parse
        with pytest.raises(RequestError) as caught:
            parse({"model": "demo", **fields}, LIMITS)
        assert "launch" not in caught.value.message
