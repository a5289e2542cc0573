"""Writes answers of /v1/responses: whole ones, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.core import FinishReason
from cluster.errors import ContextLengthError, DrafthouseError, RequestError
from cluster.text.prompt import Message
from deployments.ingress.api.response_request import Response
from deployments.ingress.api.writer import ItemWriter, LogprobWriter, OutputItem, event, metrics
from deployments.ingress.choice import Delta
from deployments.ingress.openai_request import read_calls
from deployments.ingress.wording import JsonObject

# Of each kind of item: its type, how its id begins, what grows in it by the names of events, and
# its field.
_TYPES = {
    "text": ("message", "msg", "output_text", "text"),
    "reasoning": ("reasoning", "rs", "reasoning_text", "text"),
    "function": ("function_call", "fc", "function_call_arguments", "arguments"),
    "custom": ("custom_tool_call", "ctc", "custom_tool_call_input", "input"),
}


@dataclass
class ResponseWriter(ItemWriter):
    """One answer; it is kept when it has ended, if its request wants that."""

    _request: Response
    _num_events: int = 0
    # Of tokens whose text has not come yet.
    _logprobs: list[JsonObject] = field(default_factory=list)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        self.chunks(deltas)
        _, body = self._ended()
        return json.dumps(body).encode()

    def opening(self) -> bytes:
        body = self._body("in_progress")
        return self._event("created", response=body) + self._event("in_progress", response=body)

    def closing(self) -> bytes:
        events, body = self._ended()
        return events + self._event(body["status"], response=body)

    def failing(self, error: DrafthouseError) -> bytes:
        code = error.code if isinstance(error, ContextLengthError) else "server_error"
        body = self._body("failed", error={"code": code, "message": error.message})
        return self._event(
            "error", code=error.code, message=error.message, param=error.param
        ) + self._event("failed", response=body)

    def _take(self, delta: Delta) -> None:
        super()._take(delta)
        if delta.logprobs:
            writer = LogprobWriter(self._generation.tokenizer)
            self._logprobs += writer.chat(delta.token_ids.tolist(), delta.logprobs)["content"]

    def _told(self, what: str, item: OutputItem, text: str) -> bytes:
        if what == "grown":
            return self._grown(item, text)
        if what == "begun":
            return self._outlined("added", item) + self._parted("added", item)
        # Whatever is followed by something has been completed.
        return self._done(item, "completed")

    def _grown(self, item: OutputItem, text: str) -> bytes:
        new, self._logprobs = self._logprobs, []
        item.logprobs += new
        if item.is_call and not text:
            return b""
        return self._growing("delta", item, new, delta=text)

    def _done(self, item: OutputItem, status: str) -> bytes:
        item.status = status
        said = {_TYPES[item.kind][3]: item.text, **({"name": item.name} if item.is_call else {})}
        done = self._growing("done", item, item.logprobs, **said)
        return done + self._parted("done", item) + self._outlined("done", item)

    def _ended(self) -> tuple[bytes, JsonObject]:
        """The end of the last item, and the whole answer, which is kept from now on."""
        events, last, generation = self._filled(), self._items[-1], self._generation
        is_full = self._last.finish_reason is FinishReason.LENGTH
        is_cut = is_full or self._last.is_cut
        if self._logprobs and not last.is_call:  # of tokens without text
            events += self._grown(last, "")
        # A call may be complete though the answer is cut off behind it.
        is_open = not last.is_complete if last.is_call else is_cut
        events += self._done(last, "incomplete" if is_open else "completed")
        prompt, output = generation.num_prompt_tokens, generation.num_output_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": generation.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }
        body = self._body(
            "incomplete" if is_cut else "completed",
            output=list(map(_written, self._items)),
            incomplete_details=(
                {"reason": "max_output_tokens" if is_full else "stop"} if is_cut else None
            ),
            usage=usage,
            metrics=metrics(generation),
        )
        self._request.keep(body, _message(self._items))
        return events, body

    def _body(self, status: str, **more: Any) -> JsonObject:
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._request.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "background": False,
            "truncation": "disabled",
            "store": self._request.store,
            "seed": self._generation.prompts[0].seed,
            **self._request.repeated(),
            **more,
        }

    def _outlined(self, end: str, item: OutputItem) -> bytes:
        return self._event(f"output_item.{end}", output_index=item.index, item=_written(item))

    def _parted(self, end: str, item: OutputItem) -> bytes:
        if item.is_call:  # it has no parts
            return b""
        return self._event(f"content_part.{end}", **_place(item), part=_part(item))

    def _growing(
        self, end: str, item: OutputItem, logprobs: list[JsonObject], **fields: Any
    ) -> bytes:
        if item.kind == "text":  # the others have no place for them
            fields["logprobs"] = logprobs
        return self._event(f"{_TYPES[item.kind][2]}.{end}", **_place(item), **fields)

    def _event(self, end: str, **fields: Any) -> bytes:
        self._num_events += 1
        kind = end if end == "error" else f"response.{end}"
        return event(kind, sequence_number=self._num_events - 1, **fields)


def _place(item: OutputItem) -> JsonObject:
    """Where an item grows."""
    place = {"item_id": f"{_TYPES[item.kind][1]}_{item.mark}", "output_index": item.index}
    return place if item.is_call else {**place, "content_index": 0}


def _written(item: OutputItem) -> JsonObject:
    kind, _, _, field = _TYPES[item.kind]
    head = {"id": _place(item)["item_id"], "type": kind, "status": item.status}
    if item.is_call:
        return {**head, "call_id": item.call_id, "name": item.name, field: item.text}
    own: JsonObject = {"role": "assistant"} if item.kind == "text" else {"summary": []}
    return {**head, **own, "content": [] if item.status == "in_progress" else [_part(item)]}


def _part(item: OutputItem) -> JsonObject:
    part: JsonObject = {"type": _TYPES[item.kind][2], "text": item.text}
    if item.kind == "text":
        part |= {"annotations": [], "logprobs": item.logprobs}
    return part


def _message(items: Sequence[OutputItem]) -> Message:
    """The answer as a message of the conversation that goes on with it."""
    said = "".join(item.text for item in items if item.kind == "text")
    message: JsonObject = {"role": "assistant", "content": said}
    calls = [_repeated(item).call() for item in items if item.is_call]
    try:
        return {**message, "tool_calls": read_calls(calls, "output")} if calls else message
    except (RequestError, RecursionError):  # arguments that no prompt may have
        return message


def _repeated(item: OutputItem) -> OutputItem:
    """A call for what follows: a model may write half of a character, or an escape of one."""
    text = item.text
    if item.kind == "function":
        text = text or "{}"
        with suppress(ValueError, RecursionError):  # who reads them next tells what is wrong
            text = json.dumps(json.loads(text), ensure_ascii=False)
    return replace(item, name=_whole_characters(item.name), text=_whole_characters(text))


def _whole_characters(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair that stands alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
