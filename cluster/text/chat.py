"""Renders chat messages with a Jinja template, the model's own or a file's, in a sandbox."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from cluster.errors import ConfigError, RequestError, reason_of
from cluster.models.names import REPOSITORY
from cluster.text.json_text import json_or_text

# OpenAI's roles; other roles are accepted if the template's source names them.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# What transformers' renderer takes for itself instead of handing it to the template.
RESERVED_ARGUMENTS = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)

# Errors that a template's expressions may raise for messages it was not written for.
_TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_MAX_REASON_CHARS = 200
# More than any context holds, and far more of a core's time than a conversation takes that fills
# one; by the clock on the wall a machine that was stopped meanwhile would refuse a good one.
_MAX_RENDERED_CHARS = 16 * 1024 * 1024
_MAX_RENDER_S = 5.0


class ChatTemplate:
    """Renders conversations; every failure is a RequestError with the field and the remedy.

    source: the template's text, "" without one.
    """

    def __init__(self, pretrained: Any) -> None:
        """pretrained: the transformers tokenizer that has the template and the special tokens."""
        self._pretrained = pretrained
        template = pretrained.chat_template
        self._sources = tuple(template.values()) if isinstance(template, dict) else (template,)
        self.source = "" if template is None else "\n".join(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as prompt text in the model's own format.

        messages: in OpenAI's format; text parts are joined, other parts are refused.
        Raises RequestError for messages that the template does not support.
        """
        if not self.source:
            raise RequestError.at(
                "messages",
                "the model has no chat template; use the completions endpoint with plain text",
            )
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError.at("messages", "not a list; send a list of messages")
        if not messages:
            raise RequestError.at("messages", "empty; send at least one message")
        plain = [self._checked(message, index) for index, message in enumerate(messages)]
        try:
            self._bound()
            rendered = self._pretrained.apply_chat_template(
                plain,
                tools=None if not tools else list(tools),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(template_arguments or {}),
            )
        except jinja2.TemplateError as error:
            # Templates report errors by raise_exception; their reason is meant for the caller.
            reason = str(error)[:_MAX_REASON_CHARS]
            raise RequestError.at(
                "messages", f"the model's chat template refuses them: {reason}"
            ) from None
        except _TEMPLATE_ERRORS as error:
            # Python's own messages may quote content, so only the type of the error is given.
            raise RequestError.at(
                "messages",
                f"the model's chat template cannot render them ({type(error).__name__}); "
                "send messages with a role and text content",
            ) from None  # a log would show the message and variables of the cause
        return str(rendered)

    def _bound(self) -> None:
        """Bound what a rendering takes: a template's loops may be as long as a client says.

        Jinja hands a macro's text over when it is whole: within one, nothing is bounded.
        """
        # An import of its own: few of those who check messages render them.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        for source in self._sources:
            _compile_jinja_template(source).environment.concat = _concatenated

    def _checked(self, message: Any, index: int) -> dict[str, Any]:
        param = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError.at(param, "not an object; send one with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not (role in _ROLES or self._names(role)):
            raise RequestError.at(
                f"{param}.role", f"{str(role)[:40]!r}; use system, user, assistant or tool"
            )
        # OpenAI renamed system to developer; most open models only know the old name.
        is_renamed = role == "developer" and not self._names(role)
        checked = {**message, "role": "system" if is_renamed else role}
        if message.get("content") is not None:
            checked["content"] = text_of(message["content"], f"{param}.content")
        elif not message.get("tool_calls"):
            raise RequestError.at(f"{param}.content", "missing; send a text")
        if message.get("tool_calls"):
            checked["tool_calls"] = tool_calls_of(message["tool_calls"], f"{param}.tool_calls")
        return checked

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source


def _concatenated(parts: Iterable[str]) -> str:
    """All parts together; raises RequestError where they take too long or become too much."""
    ends_at = time.thread_time() + _MAX_RENDER_S
    kept: list[str] = []
    num_chars = 0
    for part in parts:
        kept.append(part)
        num_chars += len(part)
        if num_chars > _MAX_RENDERED_CHARS or time.thread_time() > ends_at:
            raise RequestError.at(
                "messages",
                f"the model's chat template makes more than {_MAX_RENDERED_CHARS} characters of "
                f"them, or takes a core more than {_MAX_RENDER_S:g} s; send fewer or shorter ones",
            )
    return "".join(kept)


def read_template(name: str, *, is_below: bool = False) -> str:
    """The text of a template's file.  is_below: it must be below the working directory or the
    repository; replicas, which run elsewhere, are given its absolute path.

    Raises ConfigError where it is not there, or cannot be read.
    """
    places = (Path(name).expanduser(), REPOSITORY / name)
    found = next((place for place in places if place.is_file()), None)
    folders = dict.fromkeys((Path.cwd(), REPOSITORY.resolve()))
    if found is None or (is_below and not any(map(found.resolve().is_relative_to, folders))):
        raise ConfigError.at(
            "answers.chat_template",
            f"{name} is no file below {' or '.join(map(str, folders))}; name a file with a Jinja "
            "template, or leave it out for the model's own",
        )
    try:
        return found.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.at(
            "answers.chat_template",
            f"{found} cannot be read ({reason_of(error)}); name a text file in UTF-8",
        ) from error


def text_of(content: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Message content as one text; parts are joined by line breaks, as in vLLM.

    kinds: of parts that are texts.  Raises RequestError with `param`, or the path of the part below
    it, if content is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError.at(param, f"{_kind(content)}; send a string or a list of text parts")
    return "\n".join(part_text(part, f"{param}[{i}]", kinds) for i, part in enumerate(content))


def part_text(part: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text part's text; raises RequestError, as `text_of`, for what is none."""
    if not isinstance(part, Mapping):
        raise RequestError.at(param, f"{_kind(part)}; send a text part")
    kind, text = part.get("type"), part.get("text")
    if kind is None:
        raise RequestError.at(f"{param}.type", "missing; send text")
    if kind not in kinds:
        raise RequestError.at(
            param, f"a part of type {str(kind)[:40]!r}; this model takes text parts only"
        )
    if not isinstance(text, str):
        raise RequestError.at(f"{param}.text", f"{_kind(text)}; send a string")
    return text


def _kind(content: Any) -> str:
    return "missing" if content is None else f"of type {type(content).__name__!r}"


def tool_calls_of(calls: Any, param: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates iterate over them.

    Arguments that are no JSON stay a text: a call in an earlier answer may have been cut off.
    """
    parsed = []
    for index, call in enumerate(calls if isinstance(calls, Sequence) else (None,)):
        path = f"{param}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError.at(path, "not an object; send one with a function")
        arguments = function.get("arguments")
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):
            arguments = json_or_text(arguments or "{}", f"{path}.function.arguments")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed
