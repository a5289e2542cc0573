"""/v1/messages: Anthropic's bodies as chats, and answers in Anthropic's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core import FinishReason
from cluster.errors import DrafthouseError, RequestError, surface_of
from deployments.ingress.api.contract import Endpoint
from deployments.ingress.api.table import MAX_TOKENS
from deployments.ingress.api.table_messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.chat import parse_messages
from deployments.ingress.choice import Delta
from deployments.ingress.fields import Fields, json_kind, shown
from deployments.ingress.generation import Generation
from deployments.ingress.openai_request import model_of
from deployments.ingress.sampling import read_spec
from deployments.ingress.spec import ChatOptions, GenerationSpec, Limits, Prompt
from deployments.ingress.usage import metrics

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
    fields, model, prompt, ignored = _conversation(MESSAGES, values, limits)
    max_tokens = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    if max_tokens is None:
        raise RequestError("max_tokens: missing; send how many, at most", param="max_tokens")
    stop = fields.get("stop_sequences")
    if stop is not None and not isinstance(stop, list):
        raise RequestError(
            f"stop_sequences: {json_kind(stop)}; send a list", param="stop_sequences"
        )
    # The parser of the other endpoints reads the stop strings by OpenAI's name.
    try:
        spec = read_spec(
            Fields({**values, "stop": stop}),
            limits, (prompt,), 1, max_tokens, None,
        )  # fmt: skip
    except RequestError as error:
        if error.param != "stop":
            raise
        raise RequestError(f"stop_sequences: {error.message}", param="stop_sequences") from None
    return MessagesRequest(spec, model, fields.boolean("stream", default=False), ignored)


def parse_count_tokens(values: Mapping[str, Any], limits: Limits) -> tuple[Prompt, tuple[str, ...]]:
    """Parse the body of POST /v1/messages/count_tokens: its prompt and what had no effect."""
    _, _, prompt, ignored = _conversation(COUNT_TOKENS, values, limits)
    return prompt, ignored


def _conversation(
    endpoint: Endpoint, values: Mapping[str, Any], limits: Limits
) -> tuple[Fields, str, Prompt, tuple[str, ...]]:
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
    options = ChatOptions(add_generation_prompt=not continues, continue_final_message=continues)
    return fields, model, Prompt(messages=parsed, template=options), tuple(opened.ignored)


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


class MessagesWriter:
    """Writes one answer: whole, or as the events of a stream."""

    def __init__(self, request: MessagesRequest, generation: Generation, request_id: str) -> None:
        self._request = request
        self._generation = generation
        self._request_id = request_id
        self._reason: FinishReason | None = None
        self._stop: str | None = None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        text = "".join(map(self._take, deltas))
        body = self._message([{"type": "text", "text": text}], self._generation.num_output_tokens)
        return json.dumps({**body, **self._end(), "metrics": self._metrics()}).encode()

    def opening(self) -> bytes:
        """The events before the first token."""
        block = {"type": "text", "text": ""}
        return (
            _event("message_start", message=self._message([], 0))
            + _event("content_block_start", index=0, content_block=block)
            + _event("ping")
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for new text."""
        text = "".join(map(self._take, deltas))
        if not text:
            return b""
        delta = {"type": "text_delta", "text": text}
        return _event("content_block_delta", index=0, delta=delta)

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        return (
            _event("content_block_stop", index=0)
            + _event(
                "message_delta",
                delta=self._end(),
                usage=self._usage(self._generation.num_output_tokens),
                metrics=self._metrics(),
            )
            + _event("message_stop")
        )

    def failing(self, error: DrafthouseError) -> bytes:
        """The event that ends a stream with an error."""
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def _take(self, delta: Delta) -> str:
        self._reason = delta.finish_reason or self._reason
        self._stop = delta.stop or self._stop
        return delta.text

    def _end(self) -> dict[str, Any]:
        if self._stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        is_cut = self._reason is FinishReason.LENGTH
        return {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], num_output_tokens: int) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(num_output_tokens),
        }

    def _usage(self, num_output_tokens: int) -> dict[str, Any]:
        num_cached = self._generation.num_cached_tokens
        return {
            # Anthropic's: without those that were in the cache.
            "input_tokens": self._generation.num_prompt_tokens - num_cached,
            "output_tokens": num_output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }

    def _metrics(self) -> dict[str, Any]:
        return metrics(self._generation)


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
