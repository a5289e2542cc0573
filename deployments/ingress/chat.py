"""The messages of a conversation: what is served of them, and how many.

What they say to the model is the business of `cluster.text.chat`, for every face alike.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from cluster.text.chat import text_of
from deployments.ingress.fields import Fields, encodable, json_kind
from deployments.ingress.spec import Message

_MAX_MESSAGES = 4096
_TOOL_ROLES = ("tool", "function")


def parse_messages(value: Any) -> tuple[Message, ...]:
    """OpenAI's `messages`; content is text or a list of text parts."""
    if not isinstance(value, list):
        raise RequestError(f"messages: {json_kind(value)}; send a list", param="messages")
    if not value:
        raise RequestError("messages: empty; send at least one message", param="messages")
    if len(value) > _MAX_MESSAGES:
        raise RequestError(
            f"messages: {len(value)} messages; send at most {_MAX_MESSAGES}", param="messages"
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
    for key in value:
        # Clients echo an answer back with its empty fields (`tool_calls: null` and the like).
        if key not in ("role", "content", "name") and value[key] not in (None, [], {}):
            name = f"{path}.{key[:40]}"
            raise RequestError(f"{name}: not supported; remove it", param=name)
    content = f"{path}.content"
    message = {"role": role, "content": encodable(text_of(fields.get("content"), content), content)}
    author = fields.string("name", "")
    return {**message, "name": author} if author else message
