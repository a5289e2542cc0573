"""Checks what a request says of a conversation: its messages, and how they become a prompt.

`cluster.text.chat` renders them for the model, in the same way for HTTP and gRPC.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from cluster.text.chat import RESERVED_ARGUMENTS, text_of, tool_calls_of
from deployments.ingress.api.table import MAX_MESSAGES, MAX_TOOL_CALLS
from deployments.ingress.fields import Fields, encodable, json_kind
from deployments.ingress.spec import ChatOptions, Message

_MAX_ARGUMENTS = 32


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Parse OpenAI's `messages`; content is a text or a list of text parts."""
    if not isinstance(value, list):
        raise RequestError(f"messages: {json_kind(value)}; send a list", param="messages")
    if not value:
        raise RequestError("messages: empty; send at least one message", param="messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(value)} messages; send at most {MAX_MESSAGES}", param="messages"
        )
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, path: str) -> Message:
    fields = Fields.of(value, path)
    role = fields.string("role", "", max_len=64)
    if not role:
        raise RequestError(
            f"{path}.role: missing; send system, user, assistant or tool", param=f"{path}.role"
        )
    message: dict[str, Any] = {"role": role}
    calls = fields.get("tool_calls") or []
    if calls and role != "assistant":
        raise RequestError(
            f"{path}.tool_calls: only messages of role assistant have some; remove them",
            param=f"{path}.tool_calls",
        )
    content = f"{path}.content"
    if fields.get("content") is None and calls:
        message["content"] = ""  # templates ask for its length
    else:
        message["content"] = encodable(text_of(fields.get("content"), content), content)
    if calls:
        message["tool_calls"] = _tool_calls(calls, path)
    for key in ("name", "tool_call_id"):
        text = fields.string(key, "")
        if text:
            message[key] = text
    return message


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    name = f"{path}.tool_calls"
    if not isinstance(calls, list):
        raise RequestError(f"{name}: {json_kind(calls)}; send a list", param=name)
    if len(calls) > MAX_TOOL_CALLS:
        raise RequestError(f"{name}: {len(calls)} calls; send at most {MAX_TOOL_CALLS}", param=name)
    return tool_calls_of(calls, path)


def parse_template(fields: Fields) -> ChatOptions:
    """Parse what the model's chat template is told beside the messages."""
    continues = fields.boolean("continue_final_message", default=False)
    adds = fields.boolean("add_generation_prompt", default=not continues)
    if continues and adds:
        raise RequestError(
            "continue_final_message: not together with add_generation_prompt; send one of them",
            param="continue_final_message",
        )
    return ChatOptions(adds, continues, _arguments(fields.get("chat_template_kwargs")))


def _arguments(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"{name}: {json_kind(value)}; send an object", param=name)
    if len(value) > _MAX_ARGUMENTS:
        raise RequestError(f"{name}: {len(value)} keys; send at most {_MAX_ARGUMENTS}", param=name)
    for key in value:
        # They are the renderer's own, and decide what code reads the messages.
        if key in RESERVED_ARGUMENTS:
            raise RequestError(
                f"{name}.{key}: not an argument of a template; remove it", param=f"{name}.{key}"
            )
    return dict(value)
