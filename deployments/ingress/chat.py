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

_TOOL_ROLES = ("tool", "function")


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
    if not role or role in _TOOL_ROLES:
        remedy = f"{role!r}: tool calls are not served" if role else "missing"
        raise RequestError(
            f"{path}.role: {remedy}; send system, user or assistant", param=f"{path}.role"
        )
    content = f"{path}.content"
    message = {"role": role, "content": encodable(text_of(fields.get("content"), content), content)}
    author = fields.string("name", "")
    return {**message, "name": author} if author else message
