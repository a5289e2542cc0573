"""The items of an answer of /v1/responses, and the events that tell of each."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from cluster.text.tool_calls.base import CallPiece

# event(kind, **fields) writes an event of the stream.
Event = Callable[..., bytes]


class TextItem:
    """The answer's text, or its reasoning: one part that grows."""

    def __init__(self, index: int, *, is_reasoning: bool) -> None:
        self.is_reasoning = is_reasoning
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self._id = f"{'rs' if is_reasoning else 'msg'}_{uuid.uuid4().hex}"
        self._index = index
        self._kind = "reasoning_text" if is_reasoning else "output_text"

    def open(self, event: Event) -> bytes:
        item = self._item("in_progress", [])
        return event(
            "response.output_item.added", output_index=self._index, item=item
        ) + self._event(event, "response.content_part.added", part=self._part())

    def add(self, event: Event, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """New text; logprobs: of its tokens, for those who asked."""
        self.text += text
        self.logprobs += logprobs
        more = {} if self.is_reasoning else {"logprobs": logprobs}
        return self._event(event, f"response.{self._kind}.delta", delta=text, **more)

    def close(self, event: Event, status: str) -> bytes:
        more = {} if self.is_reasoning else {"logprobs": self.logprobs}
        return (
            self._event(event, f"response.{self._kind}.done", text=self.text, **more)
            + self._event(event, "response.content_part.done", part=self._part())
            + event("response.output_item.done", output_index=self._index, item=self.body(status))
        )

    def body(self, status: str) -> dict[str, Any]:
        return self._item(status, [self._part()])

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if self.is_reasoning:
            return {
                "id": self._id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }  # fmt: skip
        return {
            "id": self._id, "type": "message", "role": "assistant", "status": status,
            "content": content,
        }  # fmt: skip

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._kind, "text": self.text}
        return part if self.is_reasoning else {**part, "annotations": [], "logprobs": self.logprobs}

    def _event(self, event: Event, kind: str, **fields: Any) -> bytes:
        return event(kind, item_id=self._id, output_index=self._index, content_index=0, **fields)


class CallItem:
    """One call of a function."""

    def __init__(self, index: int, name: str) -> None:
        self.name = name
        self.arguments = ""
        self.is_complete = False
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._id = f"fc_{uuid.uuid4().hex}"
        self._index = index

    def open(self, event: Event) -> bytes:
        return event(
            "response.output_item.added", output_index=self._index, item=self.body("in_progress")
        )

    def add(self, event: Event, piece: CallPiece) -> bytes:
        """More of its arguments."""
        self.is_complete = piece.is_end
        if not piece.arguments:
            return b""
        self.arguments += piece.arguments
        return event(
            "response.function_call_arguments.delta",
            item_id=self._id, output_index=self._index, delta=piece.arguments,
        )  # fmt: skip

    def close(self, event: Event, status: str) -> bytes:
        return event(
            "response.function_call_arguments.done",
            item_id=self._id, output_index=self._index, arguments=self.arguments, name=self.name,
        ) + event(
            "response.output_item.done", output_index=self._index, item=self.body(status)
        )  # fmt: skip

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id, "type": "function_call", "call_id": self.call_id, "name": self.name,
            "arguments": self.arguments, "status": status,
        }  # fmt: skip
