"""Parsing of OpenAI bodies: accepted fields, and errors for all others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.client import GenerateRequest, SpeculationRequest
from cluster.config.parse import parse
from cluster.config.schema import ApiConfig, Config
from cluster.core import SamplingParams, SpeculationOptions
from cluster.errors import RequestError
from cluster.requests.fields import DEFAULT_TENANT, tenant_of
from cluster.text.dialect import Dialect
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, CompletionBody
from deployments.ingress.spec import Limits, ResponseStore
from tests.support.deployments.api import Json
from tests.support.text.tokenizers_for_tests import byte_level_folder

CONFIG = parse(
    Config,
    {
        "model_name": "demo",
        "drafters": {"lm": {"kind": "ngram"}, "lookup": {"kind": "ngram"}},
        "tasks": {"default": ["lm", "lookup"], "code": ["lm", "lookup"]},
        "coordinator": {
            "max_draft_tokens": 16,
            "latency_classes": {"throughput": 1.0},
            "laws": ["coupled", "rejection"],
        },
        "ingress": {
            "max_choices": 4,
            "max_sequences_per_request": 8,
            "max_logprobs": 5,
            "max_stop_strings": 2,
        },
        "api": {"compatibility": "strict"},
    },
)
LIMITS = Limits(CONFIG, 100, Dialect(), SamplingParams(max_tokens=0), ResponseStore(0, 0))
LENIENT = replace(LIMITS, config=replace(CONFIG, api=ApiConfig()))


def completion(**fields: Any) -> Json:
    return {"model": "demo", "prompt": "hello", **fields}


PLAIN = CompletionBody.parse(completion(), LIMITS).spec


def chat(**fields: Any) -> Json:
    return {"model": "demo", "messages": [{"role": "user", "content": "hello"}], **fields}


def refused(parse: Any, *arguments: Any) -> RequestError:
    """The error of what is refused."""
    with pytest.raises(RequestError) as caught:
        parse(*arguments)
    return caught.value


def test_the_checkpoints_defaults_apply_unless_the_request_overrides_them():
    defaults = SamplingParams(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=64
    )
    limits = replace(LIMITS, defaults=defaults)
    for request in (Chat.parse(chat(), limits), CompletionBody.parse(completion(), limits)):
        assert request.spec.params == replace(defaults, max_tokens=0)
    assert Chat.parse(chat(), limits).spec.default_max_tokens == 64
    assert CompletionBody.parse(completion(), limits).spec.default_max_tokens == 16
    said = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert Chat.parse(chat(**said), limits).spec.params == SamplingParams(max_tokens=0)
    spec = to_spec(GenerateRequest(model="demo", text="x"), limits)
    assert (spec.params.top_k, spec.default_max_tokens) == (20, 64)


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("text", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
def test_a_prompt_may_be_text_or_tokens_one_or_several(prompt: Any, count: int):
    assert len(CompletionBody.parse(completion(prompt=prompt), LIMITS).spec.prompts) == count


@pytest.mark.parametrize("knows_developer", [False, True])
def test_messages_are_rendered_as_without_the_ingress(tmp_path: Path, knows_developer: bool):
    template = "{% for m in messages %}[{{ m.role }}|{{ m.name }}|{{ m.content }}]{% endfor %}"
    if knows_developer:
        template += "{% if messages[0].role == 'developer' %}!{% endif %}"
    pretrained = PreTrainedTokenizerFast.from_pretrained(byte_level_folder(tmp_path))
    pretrained.chat_template = template
    tokenizer = Tokenizer(pretrained)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts, "name": "ann"},
    ]
    parsed = Chat.parse(chat(messages=messages), LIMITS).spec.prompts[0].messages
    rendered = tokenizer.render_chat(parsed)
    assert rendered == tokenizer.render_chat(messages)
    assert "[user|ann|a\nb]" in rendered
    assert rendered.endswith("!") == knows_developer


def test_a_single_stop_string_obeys_the_limits_of_a_list():
    assert CompletionBody.parse(completion(stop="x" * 256), LIMITS).spec.stop == ("x" * 256,)
    for stop in ("x" * 257, ["x" * 257]):
        error = refused(CompletionBody.parse, completion(stop=stop), LIMITS)
        assert "longer than 256" in error.message


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("latency_class", "throughput", None),
        ("latency_class", "", None),
        ("latency_class", "interactive", r"'interactive' .* allowed: throughput"),
        ("law", "rejection", None),
        ("law", "multi_step", r"'multi_step' .* allowed: coupled, rejection"),
        ("law", "block", "block is gone; rejection accepts as many drafts, so name that"),
    ],
)
@pytest.mark.parametrize("face", ["http", "grpc"])
def test_a_request_may_name_what_is_open_to_requests(
    face: str, name: str, value: str, refusal: str | None
):
    def asked() -> SpeculationOptions:
        if face == "http":
            body = CompletionBody.parse(completion(speculation={name: value}), LIMITS)
            return body.spec.speculation
        laws = {"rejection": 1, "multi_step": 2, "block": 3}
        options = SpeculationRequest(**{name: laws.get(value, value)})
        call = GenerateRequest(model="demo", text="x", speculation=options)
        return to_spec(call, LIMITS).speculation

    if refusal is None:
        assert getattr(asked(), name) == (value or None)
        return
    with pytest.raises(RequestError, match=refusal) as caught:
        asked()
    assert caught.value.param == f"speculation.{name}"


def test_the_sequences_of_one_request_are_limited():
    few = replace(CONFIG.ingress, max_sequences_per_request=3)
    narrow = replace(LIMITS, config=replace(CONFIG, ingress=few))
    CompletionBody.parse(completion(prompt=["a"] * 3), narrow)
    for read, body, param in (
        (CompletionBody.parse, completion(prompt=["a"] * 4), "prompt"),
        (CompletionBody.parse, completion(prompt=["a"] * 2, n=2), "prompt"),
        (CompletionBody.parse, completion(n=4), "n"),
        (Chat.parse, chat(n=4), "n"),
        (to_spec, GenerateRequest(model="demo", text="x", n=4), "n"),
    ):
        error = refused(read, body, narrow)
        assert error.param == param
        assert "max_sequences_per_request" in error.message


def test_a_salt_becomes_a_tenant_and_goes_no_further():
    plain, salted, other = (
        CompletionBody.parse(completion(**fields), LIMITS).spec
        for fields in ({}, {"cache_salt": "secret"}, {"cache_salt": "Secret"})
    )
    said = Chat.parse(chat(cache_salt="secret"), LIMITS).spec
    called = to_spec(GenerateRequest(model="demo", text="x", cache_salt="secret"), LIMITS)
    assert {one.tenant for one in (salted, said, called)} == {tenant_of("secret")}
    assert other.tenant != salted.tenant
    assert "secret" not in repr(salted)
    assert plain.tenant == DEFAULT_TENANT
