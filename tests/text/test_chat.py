"""Conversations that cannot be rendered raise a RequestError with field and remedy."""

import traceback
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.errors import RequestError
from cluster.text.tokenizer import Tokenizer
from tests.support.errors import request_error
from tests.support.text.tokenizers_for_tests import byte_level_folder

SECRET = "my secret prompt"


def refused(tokenizer: Tokenizer, messages: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        tokenizer.apply_chat_template(messages)
    # Nor in what a log of the error would show, its causes included.
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    return raised.value


def with_template(tokenizer_folder: Path, template: Any) -> Tokenizer:
    pretrained = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    pretrained.chat_template = template
    return Tokenizer(pretrained)


def said(role: Any, content: Any = SECRET, **more: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": role, "content": content, **more}]


USER = said("user")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (SECRET, "messages"),
        ({"role": "user"}, "messages"),
        ([SECRET], "messages[0]"),
        (said("robot"), "messages[0].role"),
        (said(3), "messages[0].role"),
        ([{"content": SECRET}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (said("user", None), "messages[0].content"),
        (said("user", 7), "messages[0].content"),
        (said("user", [{"type": "image_url"}]), "messages[0].content[0]"),
        (said("user", [SECRET]), "messages[0].content[0]"),
        ([*said("user", "a"), *said("tool")], "messages"),
        (said("assistant", None, tool_calls=[{"function": "f"}]), "messages[0].tool_calls[0]"),
    ],
)
def test_a_bad_conversation_names_the_field(byte_level: Tokenizer, messages: Any, param: str):
    assert refused(byte_level, messages).param == param


def test_the_error_contains_the_templates_own_reason(byte_level: Tokenizer):
    assert "only system, user and assistant speak here" in refused(byte_level, said("tool")).message


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        (said("user", PARTS), said("user", "one\ntwo")),
        (said("developer"), said("system")),  # to models that know no developer
    ],
)
def test_what_a_model_does_not_know_becomes_what_it_knows(
    byte_level: Tokenizer, messages: Any, same: Any
):
    assert byte_level.render_chat(messages) == byte_level.render_chat(same)


def called(written: str) -> list[dict[str, Any]]:
    call = {"function": {"name": "weather", "arguments": written}}
    return said("assistant", None, tool_calls=[call])


ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
#  template, messages, what else it is given, what it makes of them
RENDERED = {
    "a role that it names": (
        "{% for m in messages %}{% if m.role == 'ipython' %}{{ m.content }}{% endif %}{% endfor %}",
        said("ipython", "x"),
        {},
        "x",
    ),
    "calls, their arguments as objects": (
        f"{{{{ {ARGUMENTS}.city }}}}|{{{{ tools[0].name }}}}",
        called('{"city": "Kyoto"}'),
        {"tools": [{"name": "weather"}]},
        "Kyoto|weather",
    ),
    "a call that was cut off, as it was written": (
        f"{{{{ {ARGUMENTS} }}}}",
        called('{"city": "Ky'),
        {},
        '{"city": "Ky',
    ),
    "arguments of its own": (
        "{{ 'think' if enable_thinking else 'answer' }}",
        USER,
        {"template_arguments": {"enable_thinking": True}},
        "think",
    ),
    "several templates, of which the default counts": (
        {"default": "plain", "tool_use": "tools"},
        USER,
        {},
        "plain",
    ),
}


@pytest.mark.parametrize(
    ("template", "messages", "more", "expected"), RENDERED.values(), ids=RENDERED
)
def test_a_template_is_given(
    folder: Path, template: Any, messages: Any, more: dict[str, Any], expected: str
):
    assert with_template(folder, template).render_chat(messages, **more) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.nothing.there }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{% for broken",
    ],
)
def test_a_template_that_fails_is_a_request_error_without_content(folder: Path, template: str):
    refused(with_template(folder, template), USER)


def test_a_model_without_template_is_refused_with_the_reason(folder: Path):
    tokenizer = with_template(folder, None)
    assert not tokenizer.chat_template
    assert "no chat template" in refused(tokenizer, USER).message


PART = "0123456789" * 100
GROWING = "{% for i in range(n) %}{% for j in range(n) %}" + PART + "{% endfor %}{% endfor %}"
OF_PARTS = "{% macro part() %}" + PART + "{% endmacro %}" + GROWING.replace(PART, "{{ part() }}")


@pytest.mark.parametrize("template", [GROWING, OF_PARTS, {"default": GROWING}])
def test_a_template_whose_text_grows_with_an_argument_is_stopped(tmp_path: Path, template: Any):
    tokenizer = with_template(byte_level_folder(tmp_path), template)
    assert len(tokenizer.render_chat(USER, template_arguments={"n": 30})) == 900_000
    with request_error("more than 16777216 characters", "messages"):
        tokenizer.render_chat(USER, template_arguments={"n": 99_000})
