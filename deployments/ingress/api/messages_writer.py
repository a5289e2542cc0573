"""Writes answers of /v1/messages: whole ones, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cluster.core import FinishReason
from cluster.errors import DrafthouseError
from deployments.ingress.api.messages import AnthropicMessages, error_body
from deployments.ingress.api.writer import ItemWriter, OutputItem, event
from deployments.ingress.choice import Delta
from deployments.ingress.usage import metrics

# The block of each kind of item, its field that grows, and the delta that brings more of it.
_TEXT = {"type": "text", "text": ""}, "text", "text_delta"
_THINKING = {"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking_delta"
_CALL = {"type": "tool_use"}, "partial_json", "input_json_delta"
_BLOCKS: dict[str, tuple[dict[str, str], str, str]] = {
    "text": _TEXT,
    "reasoning": _THINKING,
    "function": _CALL,
    "custom": _CALL,
}


class MessagesWriter(ItemWriter):
    """Writes one answer: whole, or as the events of a stream."""

    _request: AnthropicMessages

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        self.chunks(deltas)
        self._filled()
        body = self._message(list(map(_complete, self._items)))
        return json.dumps({**body, **self._end(), "metrics": metrics(self._generation)}).encode()

    def opening(self) -> bytes:
        return event("message_start", message=self._message([])) + event("ping")

    def closing(self) -> bytes:
        told = metrics(self._generation)
        return (
            self._filled()
            + self._told("ended", self._items[-1], "")
            + event("message_delta", delta=self._end(), usage=self._usage(), metrics=told)
            + event("message_stop")
        )

    def failing(self, error: DrafthouseError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._request_id) + b"\n\n"

    def _told(self, what: str, item: OutputItem, text: str) -> bytes:
        if what == "begun":
            return event("content_block_start", index=item.index, content_block=_block(item))
        if what == "ended":
            return event("content_block_stop", index=item.index)
        _, field, kind = _BLOCKS[item.kind]
        delta = {"type": kind, field: text}
        return event("content_block_delta", index=item.index, delta=delta) if text else b""

    def _end(self) -> dict[str, Any]:
        last = self._last
        if last.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
        reason = "tool_use" if last.has_calls and not last.is_cut else "end_turn"
        if last.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        num_cached = self._generation.num_cached_tokens
        return {
            # Anthropic's: without those that were in the cache.
            "input_tokens": self._generation.num_prompt_tokens - num_cached,
            "output_tokens": self._generation.num_output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }


def _block(item: OutputItem) -> dict[str, Any]:
    """A block that begins."""
    block = _BLOCKS[item.kind][0]
    call = {"id": f"toolu_{item.mark[:24]}", "name": item.name, "input": {}}
    return {**block, **call} if item.is_call else {**block}


def _complete(item: OutputItem) -> dict[str, Any]:
    """A block of a whole answer."""
    block = _block(item)
    if not item.is_call:
        return {**block, block["type"]: item.text}
    try:
        given = json.loads(item.text or "{}")
        json.dumps(given, allow_nan=False)  # what is told must be JSON
    except (ValueError, RecursionError):  # the call is cut off, or its arguments are no JSON
        given = {}
    return {**block, "input": given if isinstance(given, dict) else {}}
