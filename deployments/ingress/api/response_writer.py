"""Writes answers of /v1/responses: whole ones, and the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from cluster.core import FinishReason
from cluster.errors import DrafthouseError
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.api.response_request import ResponseRequest
from deployments.ingress.api.response_store import ResponseStore, StoredResponse
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation
from deployments.ingress.logprob_writer import LogprobWriter
from deployments.ingress.usage import metrics


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
        self._writer = LogprobWriter(tokenizer, is_chat=True)
        self._item_id = f"msg_{generation.id.removeprefix('resp_')}"
        self._num_events = 0
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._reason: FinishReason | None = None

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        for delta in deltas:
            self._take(delta)
        return json.dumps(self._ended()).encode()

    def opening(self) -> bytes:
        """The events before the first token."""
        body = self._body("in_progress", [])
        return b"".join(
            (
                self._event("response.created", response=body),
                self._event("response.in_progress", response=body),
                self._event(
                    "response.output_item.added",
                    output_index=0,
                    item=self._item("in_progress", []),
                ),
                self._part_event("response.content_part.added", part=self._part("", [])),
            )
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for new text."""
        events = []
        for delta in deltas:
            logprobs = self._take(delta)
            if delta.text or logprobs:
                events.append(
                    self._part_event(
                        "response.output_text.delta", delta=delta.text, logprobs=logprobs
                    )
                )
        return b"".join(events)

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        text = "".join(self._texts)
        part = self._part(text, self._logprobs)
        body = self._ended()
        item = body["output"][0]
        return b"".join(
            (
                self._part_event("response.output_text.done", text=text, logprobs=self._logprobs),
                self._part_event("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{body['status']}", response=body),
            )
        )

    def failing(self, error: DrafthouseError) -> bytes:
        """The events that end a stream with an error."""
        body = self._body("failed", []) | {
            "error": {"code": "server_error", "message": error.message}
        }
        return self._event(
            "error", code=error.code, message=error.message, param=error.param
        ) + self._event("response.failed", response=body)

    def _take(self, delta: Delta) -> list[dict[str, Any]]:
        """Remember `delta`; returns its log-probabilities, if they are asked for."""
        self._texts.append(delta.text)
        self._reason = delta.finish_reason or self._reason
        if not self._request.shows_logprobs:
            return []
        found: list[dict[str, Any]] = self._writer.write(delta.token_ids.tolist(), delta.logprobs)[
            "content"
        ]
        self._logprobs += found
        return found

    def _ended(self) -> dict[str, Any]:
        """The whole answer, which is kept from now on."""
        text = "".join(self._texts)
        is_cut = self._reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        body = self._body(status, [self._item(status, [self._part(text, self._logprobs)])])
        if is_cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
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
            said = {"role": "assistant", "content": text}
            self._store.put(StoredResponse(body, (*self._request.messages, said)))
        return body

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
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "store": self._request.is_stored,
            "seed": self._generation.seed_of(0),
            **self._request.asked,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
