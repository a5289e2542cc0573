"""/v1/messages: Anthropic's bodies as chats, and answers in Anthropic's format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import DrafthouseError, RequestError, surface_of
from deployments.ingress.api.contract import Endpoint
from deployments.ingress.api.table import MAX_TOKENS
from deployments.ingress.api.table_messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.tool_fields import (
    OF_MESSAGES,
    messages_fields,
    shows_thinking,
    told_by,
)
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, json_kind, shown
from deployments.ingress.openai_request import model_of, with_chat_use
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import ChatOptions, GenerationSpec, Limits, Prompt
from deployments.ingress.tools import ChatUse, read_chat_use

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class MessagesRequest:
    """ignored: names of fields that had no effect."""

    spec: GenerationSpec
    model: str
    stream: bool
    ignored: tuple[str, ...]


def parse_messages_request(values: Mapping[str, Any], limits: Limits) -> MessagesRequest:
    """Parse the body of POST /v1/messages."""
    fields, model, prompt, use, ignored = _conversation(MESSAGES, values, limits)
    max_tokens = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    if max_tokens is None:
        raise RequestError("max_tokens: missing; send how many, at most", param="max_tokens")
    stop = fields.get("stop_sequences")
    if stop is not None and not isinstance(stop, list):
        raise RequestError(
            f"stop_sequences: {json_kind(stop)}; send a list", param="stop_sequences"
        )
    # The parsers of the other endpoints read it all by OpenAI's names.
    as_chat = Fields({**messages_fields(fields), "stop": stop})

    def read() -> GenerationSpec:
        spec = read_spec(as_chat, limits, (prompt,), 1, max_tokens, None)
        return with_chat_use(spec, use)

    is_streamed = fields.boolean("stream", default=False)
    return MessagesRequest(told_by(OF_MESSAGES, read), model, is_streamed, ignored)


def parse_count_tokens(values: Mapping[str, Any], limits: Limits) -> tuple[Prompt, tuple[str, ...]]:
    """Parse the body of POST /v1/messages/count_tokens: its prompt and what had no effect."""
    _, _, prompt, _, ignored = _conversation(COUNT_TOKENS, values, limits)
    return prompt, ignored


def _conversation(
    endpoint: Endpoint, values: Mapping[str, Any], limits: Limits
) -> tuple[Fields, str, Prompt, ChatUse, tuple[str, ...]]:
    opened = endpoint.open(values, limits.compatibility)
    fields = Fields(values)
    model = model_of(fields, limits)
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise RequestError(f"messages: {json_kind(messages)}; send a list", param="messages")
    turns = [turn for i, one in enumerate(messages) for turn in _turns(one, f"messages[{i}]")]
    system = fields.get("system")
    if system is not None:
        turns.insert(0, {"role": "system", "content": _text_blocks(system, "system")})
    parsed = parse_messages(turns)
    # An answer that the client has begun is continued.
    continues = parsed[-1]["role"] == "assistant" and "tool_calls" not in parsed[-1]
    use = told_by(
        OF_MESSAGES, lambda: read_chat_use(Fields(messages_fields(fields)), limits.dialect)
    )
    use = dataclasses.replace(use, shows_reasoning=shows_thinking(fields))
    options = ChatOptions(not continues, continues, use.template_arguments or {})
    prompt = Prompt(messages=parsed, tools=use.tools, template=options)
    return fields, model, prompt, use, tuple(opened.ignored)


def _turns(message: Any, path: str) -> list[Any]:
    """The messages of a chat that say the same: results of tools are messages of their own."""
    fields = Fields.of(message, path)
    role = fields.string("role", "", max_len=64)
    if role not in ("user", "assistant", "system"):
        raise RequestError(
            f"{path}.role: {shown(role)} is none; send user or assistant", param=f"{path}.role"
        )
    content = fields.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[Any] = []
    calls: list[Any] = []
    results: list[Any] = []
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            text = block.get("content")
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": "" if text is None else _text_blocks(text, f"{where}.content"),
                }
            )
        elif kind not in ("thinking", "redacted_thinking"):  # no part of a prompt
            texts += _text_blocks([block], where.removesuffix(f"[{index}]"), index)
    turn: dict[str, Any] = {"role": role, "content": texts}
    if calls:
        turn |= {"tool_calls": calls, "content": texts or None}
    return [*results, turn] if texts or calls or not results else results


def _text_blocks(content: Any, path: str, start: int = 0) -> Any:
    """`content` as OpenAI's text parts, or the text that it is."""
    if not isinstance(content, list):
        return content
    parts = []
    for index, block in enumerate(content, start):
        is_text = isinstance(block, dict) and block.get("type") == "text"
        if not is_text or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else json_kind(block)
            name = f"{path}[{index}]"
            raise RequestError(
                f"{name}: a block of type {shown(kind)}; send blocks of text", param=name
            )
        parts.append({"type": "text", "text": block["text"]})
    return parts


def error_body(error: DrafthouseError, request_id: str) -> bytes:
    """`error` as Anthropic has it."""
    kind = _ERROR_TYPES.get(surface_of(error).http_status, "api_error")
    content = {"type": kind, "message": error.message}
    return json.dumps({"type": "error", "error": content, "request_id": request_id}).encode()
