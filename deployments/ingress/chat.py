"""Checks the messages of a chat request: supported fields and roles, and their number.

`cluster.text.chat` renders them for the model, in the same way for HTTP and gRPC.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from cluster.text.chat import text_of
from deployments.ingress.api.table import MAX_MESSAGES
from deployments.ingress.fields import Fields, encodable, json_kind
from deployments.ingress.spec import Message

# The body's own limit comes first.
_MAX_TEXT = 2**31


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
    if not role or role == "function":
        remedy = f"{role!r}: the older form of tool" if role else "missing"
        raise RequestError(
            f"{path}.role: {remedy}; send system, user, assistant or tool", param=f"{path}.role"
        )
    message: dict[str, Any] = {"role": role}
    calls = fields.get("tool_calls")
    if calls:
        message["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    content = f"{path}.content"
    if fields.get("content") is None and (calls or role == "tool"):
        message["content"] = ""
    else:
        message["content"] = encodable(text_of(fields.get("content"), content), content)
    for name, max_len in (("name", 256), ("tool_call_id", 256), ("reasoning_content", _MAX_TEXT)):
        text = fields.string(name, "", max_len)
        if text:
            message[name] = text
    return message


def _calls(value: Any, path: str) -> list[Any]:
    """The calls of an earlier answer; `cluster.text.chat` reads their arguments."""
    if not isinstance(value, list):
        raise RequestError(f"{path}: {json_kind(value)}; send a list", param=path)
    for index, call in enumerate(value):
        function = Fields.of(call, f"{path}[{index}]").get("function")
        named = Fields.of(function, f"{path}[{index}].function")
        if not named.string("name", "", max_len=64):
            place = f"{path}[{index}].function.name"
            raise RequestError(f"{place}: missing; send the tool's name", param=place)
        encodable(str(named.get("arguments")), f"{path}[{index}].function.arguments")
    return value
