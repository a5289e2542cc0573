"""Writes answers of /v1/messages: whole ones, and the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from cluster.core import FinishReason
from cluster.errors import DrafthouseError
from cluster.text.tool_calls.base import CallPiece
from deployments.ingress.api.messages import error_body
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.spec import Asked
from deployments.ingress.usage import metrics

# The field of each kind of block that grows, and the delta that brings more of it.
_GROWING = {
    "text": ("text", "text_delta"),
    "thinking": ("thinking", "thinking_delta"),
    "tool_use": ("partial_json", "input_json_delta"),
}


class MessagesWriter:
    """Writes one answer: whole, or as the events of a stream."""

    def __init__(self, request: Asked, generation: Generation, request_id: str) -> None:
        self._request = request
        self._generation = generation
        self._request_id = request_id
        self._reason: FinishReason | None = None
        self._stop: str | None = None
        self._calls_tools = False
        self._blocks: list[dict[str, Any]] = []
        self._grown: list[str] = []  # of each block, what has come of it

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        self.chunks(deltas)
        if not self._blocks:
            self._begin({"type": "text", "text": ""})
        content = [_complete(*each) for each in zip(self._blocks, self._grown, strict=True)]
        body = self._message(content, self._generation.num_output_tokens)
        return json.dumps({**body, **self._end(), "metrics": self._metrics()}).encode()

    def opening(self) -> bytes:
        """The event before the first token."""
        return _event("message_start", message=self._message([], 0)) + _event("ping")

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for what is new."""
        events = []
        for delta in deltas:
            self._reason = delta.finish_reason or self._reason
            self._stop = delta.stop or self._stop
            self._calls_tools = delta.has_calls and not delta.is_cut
            if delta.reasoning:
                events.append(self._said("thinking", delta.reasoning))
            if delta.text:
                events.append(self._said("text", delta.text))
            events += [self._called(piece) for piece in delta.calls]
        return b"".join(events)

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        # An answer without a word is an empty text.
        events = b"" if self._blocks else self._begin({"type": "text", "text": ""})
        usage = self._usage(self._generation.num_output_tokens)
        return (
            events
            + self._block_stop()
            + _event("message_delta", delta=self._end(), usage=usage, metrics=self._metrics())
            + _event("message_stop")
        )

    def failing(self, error: DrafthouseError) -> bytes:
        """The event that ends a stream with an error."""
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def _said(self, kind: str, text: str) -> bytes:
        events = b""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            events = self._begin({"type": kind, kind: "", **signed})
        return events + self._grow(text)

    def _called(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.name is not None:
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            events = self._begin(
                {"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}
            )
        return events + (self._grow(piece.arguments) if piece.arguments else b"")

    def _begin(self, block: dict[str, Any]) -> bytes:
        events = self._block_stop() if self._blocks else b""
        self._blocks.append(block)
        self._grown.append("")
        index = len(self._blocks) - 1
        return events + _event("content_block_start", index=index, content_block=block)

    def _grow(self, text: str) -> bytes:
        self._grown[-1] += text
        field, kind = _GROWING[self._blocks[-1]["type"]]
        return _event(
            "content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, field: text}
        )

    def _block_stop(self) -> bytes:
        return _event("content_block_stop", index=len(self._blocks) - 1)

    def _end(self) -> dict[str, Any]:
        if self._stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        reason = "tool_use" if self._calls_tools else "end_turn"
        if self._reason is FinishReason.LENGTH:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

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


def _complete(block: dict[str, Any], grown: str) -> dict[str, Any]:
    """A block of a whole answer."""
    if block["type"] != "tool_use":
        return {**block, block["type"]: grown}
    try:
        given = json.loads(grown or "{}")
        json.dumps(given, allow_nan=False)  # what is told must be JSON
    except (ValueError, RecursionError):  # the call is cut off, or its arguments are no JSON
        given = {}
    return {**block, "input": given if isinstance(given, dict) else {}}


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
