"""Writes the messages of chats in OpenAI's format, with tool calls and reasoning where there are
any."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from cluster.core import FinishReason
from cluster.text.tool_calls.base import CallPiece
from deployments.ingress.choice import Delta


def finish_reason(last: Delta) -> str | None:
    """Why the choice ended; None while it goes on."""
    if last.finish_reason is None:
        return None
    if last.has_calls and not last.is_cut and last.finish_reason is FinishReason.STOP:
        return "tool_calls"
    return last.finish_reason.value


def whole_message(parts: Sequence[Delta]) -> dict[str, Any]:
    """The message of an answer that is not streamed."""
    text = "".join(part.text for part in parts)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reasoning = "".join(part.reasoning for part in parts)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls: dict[int, dict[str, Any]] = {}
    for piece in (piece for part in parts for piece in part.calls):
        if piece.name is not None:
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {"id": _call_id(), "type": "function", "function": function}
        calls[piece.index]["function"]["arguments"] += piece.arguments
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = text or None
    return message


def delta_json(delta: Delta) -> str:
    """The `delta` of one chunk, as JSON."""
    fields: dict[str, Any] = {}
    if delta.text:
        fields["content"] = delta.text
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.calls:
        fields["tool_calls"] = [_piece(piece) for piece in delta.calls]
    return json.dumps(fields, separators=(",", ":"))


def _piece(piece: CallPiece) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {
        "index": piece.index,
        "id": _call_id(),
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
