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
# Of each type of item: how its id begins, what grows in it by the names of events, and its field.
_TYPES = {
    "message": ("msg", "output_text", "text"),
    "reasoning": ("rs", "reasoning_text", "text"),
    "function_call": ("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": ("ctc", "custom_tool_call_input", "input"),
}


class Item:
    """A text, a reasoning or a call: one part of an answer, which grows until the next one."""

    def __init__(self, kind: str, index: int, event: Event, name: str) -> None:
        """name: of what is called."""
        self.kind = kind
        self.name = name
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.is_complete = False
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"
        prefix, self._grown, self._field = _TYPES[kind]
        self.is_call = self._field != "text"
        self._status = "in_progress"
        self._event = event
        self._place = {"item_id": f"{prefix}_{uuid.uuid4().hex}", "output_index": index}

    def open(self) -> bytes:
        return self._told("added") if self.is_call else self._told("added") + self._parted("added")

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """New text; logprobs: of its tokens, for those who asked."""
        self.text += text
        self.logprobs += logprobs
        if self.is_call and not text:
            return b""
        return self._growing("delta", delta=text, **self._with(logprobs))

    def close(self, status: str) -> bytes:
        self._status = status
        said = {self._field: self.text}
        if self.is_call:
            return self._growing("done", **said, name=self.name) + self._told("done")
        done = self._growing("done", **said, **self._with(self.logprobs))
        return done + self._parted("done") + self._told("done")

    def body(self) -> dict[str, Any]:
        head = {"id": self._place["item_id"], "type": self.kind, "status": self._status}
        if self.is_call:
            return {**head, "call_id": self.call_id, "name": self.name, self._field: self.text}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {**head, **own, "content": [] if self._status == "in_progress" else [self._part()]}

    def told(self) -> dict[str, Any]:
        """The call for the conversation that goes on with it."""
        name = whole_characters(self.name)
        if self.kind == "custom_tool_call":
            said = {"name": name, "input": whole_characters(self.text)}
            return {"id": self.call_id, "type": "custom", "custom": said}
        function = {"name": name, "arguments": _told(self.text or "{}")}
        return {"id": self.call_id, "type": "function", "function": function}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._grown, "text": self.text}
        annotations: dict[str, Any] = {"annotations": []} if self.kind == "message" else {}
        return {**part, **annotations, **self._with(self.logprobs)}

    def _with(self, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": logprobs} if self.kind == "message" else {}

    def _told(self, end: str) -> bytes:
        index = self._place["output_index"]
        return self._event(f"response.output_item.{end}", output_index=index, item=self.body())

    def _parted(self, end: str) -> bytes:
        kind = f"response.content_part.{end}"
        return self._event(kind, **self._place, content_index=0, part=self._part())

    def _growing(self, end: str, **fields: Any) -> bytes:
        place = self._place if self.is_call else {**self._place, "content_index": 0}
        return self._event(f"response.{self._grown}.{end}", **place, **fields)


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
        self._items: list[Item] = []
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
                events.append(self._said("reasoning", delta.reasoning))
            if delta.text:
                events.append(self._said("message", delta.text))
            events += [self._called(piece) for piece in delta.calls]
        return b"".join(events)

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        events = self._close_items()
        body = self._ended()
        return events + self._event(f"response.{body['status']}", response=body)

    def _said(self, kind: str, text: str) -> bytes:
        is_new = not self._items or self._items[-1].kind != kind
        events = self._begin(kind) if is_new else b""
        return events + self._items[-1].add(text, self._taken_logprobs())

    def _called(self, piece: CallPiece) -> bytes:
        kind = "custom_tool_call" if piece.is_text else "function_call"
        events = b"" if piece.name is None else self._begin(kind, piece.name)
        self._items[-1].is_complete = piece.is_end
        self._taken_logprobs()  # an item of a call has no place for them
        return events + self._items[-1].add(piece.arguments, [])

    def _begin(self, kind: str, name: str = "") -> bytes:
        # Whatever is followed by something has been completed.
        events = self._items[-1].close("completed") if self._items else b""
        self._items.append(Item(kind, len(self._items), self._event, name))
        return events + self._items[-1].open()

    def _close_items(self) -> bytes:
        """The end of the last item; an answer without any has an empty text."""
        events = b"" if self._items else self._begin("message")
        last = self._items[-1]
        if last.is_call:  # it may be complete though the answer is cut off behind it
            return events + last.close("completed" if last.is_complete else "incomplete")
        if self._logprobs:  # of tokens without text
            events += last.add("", self._taken_logprobs())
        return events + last.close(self._status)

    @property
    def _status(self) -> str:
        is_cut = self._is_cut or self._reason is FinishReason.LENGTH
        return "incomplete" if is_cut else "completed"

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
        written = self._writer.write(delta.token_ids.tolist(), delta.logprobs)
        return list(written["content"])

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _ended(self) -> dict[str, Any]:
        """The whole answer, which is kept from now on."""
        status = self._status
        body = self._body(status, [item.body() for item in self._items])
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
        said = "".join(item.text for item in self._items if item.kind == "message")
        calls = [item.told() for item in self._items if item.is_call]
        message: dict[str, Any] = {"role": "assistant", "content": said}
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


def _told(arguments: str) -> str:
    """Arguments for what follows: a model may write an escape of half a character."""
    try:
        value = parse_json(arguments, "arguments")
    except RequestError:
        return arguments  # as they are: who reads them next tells what is wrong
    return whole_characters(json.dumps(value, ensure_ascii=False))
