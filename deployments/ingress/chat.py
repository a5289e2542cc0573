"""Checks what a request says of a conversation: its messages, and how they become a prompt.

`cluster.text.chat` renders them for the model, in the same way for HTTP and gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import RequestError
from cluster.text.chat import text_of, tool_calls_of
from deployments.ingress.api.table import MAX_MESSAGES, MAX_TOOL_CALLS
from deployments.ingress.fields import Fields, encodable, encodable_json, json_kind
from deployments.ingress.spec import ChatOptions, Message

# The body's own limit comes first.
_MAX_TEXT = 2**31


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Parse OpenAI's `messages`; content is a text or a list of text parts."""
    if not isinstance(value, list):
        raise RequestError.at("messages", f"{json_kind(value)}; send a list")
    if not value:
        raise RequestError.at("messages", "empty; send at least one message")
    if len(value) > MAX_MESSAGES:
        raise RequestError.at("messages", f"{len(value)} messages; send at most {MAX_MESSAGES}")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, path: str) -> Message:
    fields = Fields.of(value, path)
    role = fields.string("role", "", max_len=64)
    if not role or role == "function":
        remedy = f"{role!r}: the older form of tool" if role else "missing"
        raise RequestError.at(f"{path}.role", f"{remedy}; send system, user, assistant or tool")
    message: dict[str, Any] = {"role": role}
    calls = fields.get("tool_calls")
    calls = None if calls == [] else calls
    if calls is not None and role != "assistant":
        raise RequestError.at(
            f"{path}.tool_calls", "only messages of role assistant have some; remove them"
        )
    content = f"{path}.content"
    if fields.get("content") is None and calls is not None:
        message["content"] = ""  # templates ask for its length
    else:
        message["content"] = encodable(text_of(fields.get("content"), content), content)
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, path)
    for name, max_len in (("name", 256), ("tool_call_id", 256), ("reasoning_content", _MAX_TEXT)):
        text = fields.string(name, "", max_len)
        if text:
            message[name] = text
    return message


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """The calls of an earlier answer."""
    name = f"{path}.tool_calls"
    if not isinstance(calls, list):
        raise RequestError.at(name, f"{json_kind(calls)}; send a list")
    if len(calls) > MAX_TOOL_CALLS:
        raise RequestError.at(name, f"{len(calls)} calls; send at most {MAX_TOOL_CALLS}")
    found = tool_calls_of(calls, path)
    for index, call in enumerate(found):
        function = f"{name}[{index}].function"
        if not Fields.of(call["function"], function).string("name", "", max_len=64):
            raise RequestError.at(f"{function}.name", "missing; send the tool's name")
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str | dict):
            raise RequestError.at(
                f"{function}.arguments", f"{json_kind(arguments)}; send a JSON object as a text"
            )
        encodable_json(arguments, f"{function}.arguments")
        encodable_json(call, f"{name}[{index}]")
    return found


def parse_template(fields: Fields, arguments: Mapping[str, Any]) -> ChatOptions:
    """Parse what the model's chat template is told beside the messages.

    arguments: of the template's own making.
    """
    continues = fields.boolean("continue_final_message", default=False)
    adds = fields.boolean("add_generation_prompt", default=not continues)
    if continues and adds:
        raise RequestError.at(
            "continue_final_message", "not together with add_generation_prompt; send one of them"
        )
    return ChatOptions(adds, continues, arguments)
