"""Conversations that cannot be rendered raise a RequestError with field and remedy."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.errors import RequestError
from cluster.text.tokenizer import Tokenizer
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


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (SECRET, "messages"),
        ({"role": "user"}, "messages"),
        ([SECRET], "messages[0]"),
        ([{"role": "robot", "content": SECRET}], "messages[0].role"),
        ([{"role": 3, "content": SECRET}], "messages[0].role"),
        ([{"content": SECRET}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [SECRET]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": SECRET}], "messages"),
        (
            [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_a_bad_conversation_names_the_field(
    byte_level: Tokenizer, messages: Any, param: str
) -> None:
    assert refused(byte_level, messages).param == param


def test_the_error_contains_the_templates_own_reason(byte_level: Tokenizer) -> None:
    error = refused(byte_level, [{"role": "tool", "content": SECRET}])
    assert "only system, user and assistant speak here" in error.message


def test_text_parts_are_joined(byte_level: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (
        byte_level.apply_chat_template([{"role": "user", "content": parts}]).tolist()
        == byte_level.apply_chat_template([{"role": "user", "content": "one\ntwo"}]).tolist()
    )


def test_developer_is_system_to_models_that_know_no_developer(byte_level: Tokenizer) -> None:
    assert byte_level.render_chat(
        [{"role": "developer", "content": "x"}]
    ) == byte_level.render_chat([{"role": "system", "content": "x"}])


def test_a_role_that_the_template_names_is_accepted(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'ipython' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(folder, template)
    assert tokenizer.render_chat([{"role": "ipython", "content": "x"}]) == "x"


def test_tool_call_arguments_reach_the_template_as_objects(folder: Path) -> None:
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}|{{ tools[0].name }}"
    call = {"function": {"name": "weather", "arguments": '{"city": "Kyoto"}'}}
    rendered = with_template(folder, template).render_chat(
        [{"role": "assistant", "content": None, "tool_calls": [call]}], tools=[{"name": "weather"}]
    )
    assert rendered == "Kyoto|weather"


def test_a_call_that_was_cut_off_reaches_the_template_as_it_was_written(folder: Path) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Ky'}}
    tokenizer = with_template(folder, "{{ messages[0].tool_calls[0].function.arguments }}")
    assert tokenizer.render_chat([{"role": "assistant", "tool_calls": [call]}]) == '{"city": "Ky'


def test_template_arguments_reach_the_template(folder: Path) -> None:
    tokenizer = with_template(folder, "{{ 'think' if enable_thinking else 'answer' }}")
    messages = [{"role": "user", "content": "x"}]
    rendered = tokenizer.render_chat(messages, template_arguments={"enable_thinking": True})
    assert rendered == "think"


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
def test_a_template_that_fails_is_a_request_error_without_content(
    folder: Path, template: str
) -> None:
    refused(with_template(folder, template), [{"role": "user", "content": SECRET}])


def test_a_model_without_template_is_refused_with_the_reason(folder: Path) -> None:
    tokenizer = with_template(folder, None)
    assert not tokenizer.chat_template
    assert "no chat template" in refused(tokenizer, [{"role": "user", "content": SECRET}]).message


def test_a_model_with_several_templates_uses_the_default(folder: Path) -> None:
    tokenizer = with_template(folder, {"default": "plain", "tool_use": "tools"})
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "plain"


PART = "0123456789" * 100
GROWING = "{% for i in range(n) %}{% for j in range(n) %}" + PART + "{% endfor %}{% endfor %}"
OF_PARTS = "{% macro part() %}" + PART + "{% endmacro %}" + GROWING.replace(PART, "{{ part() }}")


@pytest.mark.parametrize("template", [GROWING, OF_PARTS, {"default": GROWING}])
def test_a_template_whose_text_grows_with_an_argument_is_stopped(
    tmp_path: Path, template: Any
) -> None:
    tokenizer = with_template(byte_level_folder(tmp_path), template)
    messages = [{"role": "user", "content": "a"}]
    assert len(tokenizer.render_chat(messages, template_arguments={"n": 30})) == 900_000
    with pytest.raises(RequestError, match="more than 16777216 characters") as caught:
        tokenizer.render_chat(messages, template_arguments={"n": 99_000})
    assert caught.value.param == "messages"
