"""The messages of a conversation, checked and reduced to what chat templates read."""

from __future__ import annotations

from typing import Any

from cluster.errors import RequestError
from deployments.ingress.fields import Fields, encodable, json_kind, shown
from deployments.ingress.spec import Message

_ROLES = ("system", "developer", "user", "assistant")
_MAX_MESSAGES = 4096


def parse_messages(value: Any) -> tuple[Message, ...]:
    """OpenAI's `messages`; content is text or a list of text parts.

    `developer` is OpenAI's newer name of `system`, which is what chat templates know.
    """
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
    role = fields.get("role")
    if role not in _ROLES:
        remedy = "tool calls are not served" if role in ("tool", "function") else "unknown role"
        raise RequestError(
            f"{path}.role: {shown(role)}: {remedy}; send one of {', '.join(_ROLES)}",
            param=f"{path}.role",
        )
    for key in value:
        # Clients echo an answer back with its empty fields (`tool_calls: null` and the like).
        if key not in ("role", "content", "name") and value[key] not in (None, [], {}):
            name = f"{path}.{key[:40]}"
            raise RequestError(f"{name}: not supported; remove it", param=name)
    fields.string("name", "")
    text = _content(fields.get("content"), f"{path}.content")
    return {"role": "system" if role == "developer" else role, "content": text}


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return encodable(value, path)
    if not isinstance(value, list):
        raise RequestError(f"{path}: {json_kind(value)}; send a string", param=path)
    texts = []
    for i, item in enumerate(value):
        part = Fields.of(item, f"{path}[{i}]")
        if part.get("type") != "text":
            raise RequestError(
                f"{path}[{i}].type: {shown(part.get('type'))} is not supported; send text",
                param=f"{path}[{i}].type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"{path}[{i}].text: {json_kind(text)}; send a string", param=f"{path}[{i}].text"
            )
        texts.append(encodable(text, path))
    return "".join(texts)
