"""Writes answers of /v1/responses: whole ones, and the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from cluster.core import FinishReason
from cluster.errors import ContextLengthError, DrafthouseError, RequestError
from cluster.text.json_text import parse_json
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import CallPiece
from deployments.ingress.api.response_request import ResponseRequest
from deployments.ingress.api.response_store import ResponseStore, StoredResponse
from deployments.ingress.chat import read_calls
from deployments.ingress.choice import Delta
from deployments.ingress.fields import whole_characters
from deployments.ingress.generation import Generation
from deployments.ingress.logprob_writer import LogprobWriter
from deployments.ingress.spec import Message
from deployments.ingress.usage import metrics

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
    """One call of a function, or of a custom tool."""

    def __init__(self, index: int, name: str, *, is_text: bool) -> None:
        self.name = name
        self.arguments = ""
        self.is_text = is_text
        self.is_complete = False
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._id = f"{'ctc' if is_text else 'fc'}_{uuid.uuid4().hex}"
        self._index = index
        self._field = "input" if is_text else "arguments"
        self._kind = "custom_tool_call" if is_text else "function_call"

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
        return self._event(event, "delta", delta=piece.arguments)

    def close(self, event: Event, status: str) -> bytes:
        said = {self._field: self.arguments}
        return self._event(event, "done", **said, name=self.name) + event(
            "response.output_item.done", output_index=self._index, item=self.body(status)
        )

    def body(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id, "type": self._kind, "call_id": self.call_id, "name": self.name,
            self._field: self.arguments, "status": status,
        }  # fmt: skip

    def told(self) -> dict[str, Any]:
        """The call for the conversation that goes on with it."""
        name = whole_characters(self.name)
        if self.is_text:
            said = {"name": name, "input": whole_characters(self.arguments)}
            return {"id": self.call_id, "type": "custom", "custom": said}
        function = {"name": name, "arguments": _told(self)}
        return {"id": self.call_id, "type": "function", "function": function}

    def _event(self, event: Event, end: str, **fields: Any) -> bytes:
        kind = f"response.{self._kind}_{self._field}.{end}"
        return event(kind, item_id=self._id, output_index=self._index, **fields)


class ResponseWriter:
    """One answer; it is kept when it has ended, if its request wants that."""

    def __init__(
        self,
        request: ResponseRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        store: ResponseStore,
    ) -> None:
        self._request = request
        self._generation = generation
        self._store = store
        self._created_at = int(time.time())
        self._writer = LogprobWriter(tokenizer)
        self._num_events = 0
        self._items: list[TextItem | CallItem] = []
        self._is_open = False  # whether the last item may still grow
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet
        self._reason: FinishReason | None = None
        self._is_cut = False

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        self.chunks(deltas)
        self._close_items()
        return json.dumps(self._ended()).encode()

    def opening(self) -> bytes:
        """The events before the first token."""
        body = self._body("in_progress", [])
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for what is new."""
        events = []
        for delta in deltas:
            self._reason = delta.finish_reason or self._reason
            # Calls that are not the last of a delta are complete.
            self._is_cut = delta.is_cut
            self._logprobs += self._written_logprobs(delta)
            if delta.reasoning:
                events.append(self._said(delta.reasoning, is_reasoning=True))
            if delta.text:
                events.append(self._said(delta.text, is_reasoning=False))
            events += [self._called(piece) for piece in delta.calls]
        return b"".join(events)

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        events = self._close_items()
        body = self._ended()
        return events + self._event(f"response.{body['status']}", response=body)

    def _said(self, text: str, *, is_reasoning: bool) -> bytes:
        last = self._items[-1] if self._is_open else None
        events = b""
        if not isinstance(last, TextItem) or last.is_reasoning != is_reasoning:
            last = TextItem(len(self._items), is_reasoning=is_reasoning)
            events = self._begin(last)
        return events + last.add(self._event, text, self._taken_logprobs())

    def _called(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.name is not None:
            item = CallItem(len(self._items), piece.name, is_text=piece.is_text)
            events = self._begin(item)
        last = self._items[-1]
        assert isinstance(last, CallItem), "a call's first piece has its name"
        self._taken_logprobs()  # an item of a call has no place for them
        return events + last.add(self._event, piece)

    def _begin(self, item: TextItem | CallItem) -> bytes:
        # Whatever is followed by something has been completed.
        events = self._items[-1].close(self._event, "completed") if self._is_open else b""
        self._items.append(item)
        self._is_open = True
        return events + item.open(self._event)

    def _close_items(self) -> bytes:
        """The end of the last item; an answer without any has an empty text."""
        events = b""
        if not self._items:
            events = self._begin(TextItem(0, is_reasoning=False))
        last = self._items[-1]
        if isinstance(last, TextItem) and self._logprobs:  # of tokens without text
            events += last.add(self._event, "", self._taken_logprobs())
        self._is_open = False
        return events + last.close(self._event, self._last_status)

    @property
    def _status(self) -> str:
        is_cut = self._is_cut or self._reason is FinishReason.LENGTH
        return "incomplete" if is_cut else "completed"

    @property
    def _last_status(self) -> str:
        """Of the last item: a call may be complete though the answer is cut off behind it."""
        last = self._items[-1]
        if isinstance(last, CallItem):
            return "completed" if last.is_complete else "incomplete"
        return self._status

    def failing(self, error: DrafthouseError) -> bytes:
        """The events that end a stream with an error."""
        code = error.code if isinstance(error, ContextLengthError) else "server_error"
        body = self._body("failed", []) | {"error": {"code": code, "message": error.message}}
        return self._event(
            "error", code=error.code, message=error.message, param=error.param
        ) + self._event("response.failed", response=body)

    def _written_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if not self._request.shows_logprobs:
            return []
        found: list[dict[str, Any]] = self._writer.write(delta.token_ids.tolist(), delta.logprobs)[
            "content"
        ]
        return found

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _ended(self) -> dict[str, Any]:
        """The whole answer, which is kept from now on."""
        status = self._status
        bodies = [item.body("completed") for item in self._items[:-1]]
        body = self._body(status, [*bodies, self._items[-1].body(self._last_status)])
        if status == "incomplete":
            is_full = self._reason is FinishReason.LENGTH
            body["incomplete_details"] = {"reason": "max_output_tokens" if is_full else "stop"}
        generation = self._generation
        body["usage"] = {
            "input_tokens": generation.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": generation.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": generation.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": generation.num_prompt_tokens + generation.num_output_tokens,
        }
        body["metrics"] = metrics(generation)
        if self._request.is_stored:
            messages = (*self._request.messages, *self._said_all())
            self._store.put(StoredResponse(body, messages, self._request.owner))
        return body

    def _said_all(self) -> tuple[Message, ...]:
        """The answer as a message of the conversation that goes on with it."""
        said = [
            item.text
            for item in self._items
            if isinstance(item, TextItem) and not item.is_reasoning
        ]
        calls = [item.told() for item in self._items if isinstance(item, CallItem)]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
        if not calls:
            return (message,)
        try:
            return ({**message, "tool_calls": read_calls(calls, "output")},)
        except (RequestError, RecursionError):  # arguments that no prompt may have
            return (message,)

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "model": self._request.model,
            "output": output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "truncation": "disabled",
            "store": self._request.is_stored,
            "seed": self._generation.seed_of(0),
            **self._request.asked,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _told(call: CallItem) -> str:
    """Its arguments for what follows: a model may write an escape of half a character."""
    arguments = call.arguments or "{}"
    try:
        value = parse_json(arguments, "arguments")
    except RequestError:
        return arguments  # as they are: who reads them next tells what is wrong
    return whole_characters(json.dumps(value, ensure_ascii=False))
