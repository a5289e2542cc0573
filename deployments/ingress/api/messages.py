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
from deployments.ingress.api.tool_fields import chat_names, messages_fields, shows_thinking
from deployments.ingress.chat import parse_messages
from deployments.ingress.fields import Fields, encodable_json, json_kind, shown
from deployments.ingress.names import Names, Turn, places_of
from deployments.ingress.openai_request import model_of, with_chat_use
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import ChatOptions, GenerationSpec, Limits, Prompt
from deployments.ingress.tools import ChatUse, read_chat_use

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
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
        raise RequestError.at("max_tokens", "missing; send how many, at most")
    # The parsers of the other endpoints read it all by OpenAI's names.
    stop = fields.listed("stop_sequences")
    as_chat = Fields({**messages_fields(fields), "stop": stop})
    with prompt.names.told():
        spec = with_chat_use(read_spec(as_chat, limits, (prompt,), 1, max_tokens, None), use)
    return MessagesRequest(spec, model, fields.boolean("stream", default=False), ignored)


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
        raise RequestError.at("messages", f"{json_kind(messages)}; send a list")
    turns = [turn for i, one in enumerate(messages) for turn in _turns(one, f"messages[{i}]")]
    system = fields.get("system")
    if system is not None:
        places = {"": "system", ".content": "system"}
        turns.insert(0, Turn({"role": "system", "content": system}, places))
    as_chat = Fields(messages_fields(fields))
    names = Names(
        {
            "prompt": "messages", "stop": "stop_sequences",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use", **places_of(turns),
            **chat_names(fields, "output_config.format", "output_config.effort", "input_schema"),
        }
    )  # fmt: skip
    with names.told():
        parsed = parse_messages([turn.message for turn in turns])
        use = read_chat_use(as_chat, limits.dialect)
    # An answer that the client has begun is continued.
    continues = parsed[-1]["role"] == "assistant" and "tool_calls" not in parsed[-1]
    use = dataclasses.replace(use, shows_reasoning=shows_thinking(fields))
    options = ChatOptions(not continues, continues, use.template_arguments or {})
    prompt = Prompt(messages=parsed, tools=use.tools, template=options, names=names)
    return fields, model, prompt, use, tuple(opened.ignored)


def _turns(message: Any, path: str) -> list[Turn]:
    """The messages of a chat that say the same: results of tools are messages of their own."""
    fields = Fields.of(message, path)
    role = fields.string("role", "", max_len=64)
    if role not in ("user", "assistant", "system"):
        raise RequestError.at(f"{path}.role", f"{shown(role)} is none; send user or assistant")
    content = fields.get("content")
    if not isinstance(content, list):
        return [Turn({"role": role, "content": content}, {"": path})]
    texts: list[Any] = []
    calls: list[Any] = []
    results: list[Turn] = []
    places = {"": path}
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            places |= _call_places(where, len(calls))
            given = block.get("input")
            given = {} if given is None else Fields.of(given, f"{where}.input").values()
            arguments = json.dumps(encodable_json(given, f"{where}.input"))
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append(_result(block, where))
        elif kind not in ("thinking", "redacted_thinking"):  # no part of a prompt
            places[f".content[{len(texts)}]"] = where
            texts.append(block)  # `parse_messages` says what is wrong
    turn: dict[str, Any] = {"role": role, "content": texts}
    if calls:
        turn |= {"tool_calls": calls, "content": texts or None}
    return [*results, Turn(turn, places)] if texts or calls or not results else results


def _call_places(path: str, number: int) -> dict[str, str]:
    call = f".tool_calls[{number}]"
    return {
        call: path, f"{call}.function": path, f"{call}.function.arguments": f"{path}.input",
    }  # fmt: skip


def _result(block: Mapping[str, Any], path: str) -> Turn:
    text = block.get("content")
    content = "" if text is None else text
    return Turn(
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content},
        {"": path, ".tool_call_id": f"{path}.tool_use_id"},
    )


def error_body(error: DrafthouseError, request_id: str) -> bytes:
    """`error` as Anthropic has it."""
    kind = _ERROR_TYPES.get(surface_of(error).http_status, "api_error")
    content = {"type": kind, "message": error.message}
    return json.dumps({"type": "error", "error": content, "request_id": request_id}).encode()
