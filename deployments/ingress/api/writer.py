"""Answers as items, which all APIs write in formats of their own: texts, reasonings and calls, each
of which grows until the next one begins."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import DrafthouseError
from deployments.ingress.choice import Delta
from deployments.ingress.generation import Generation


@dataclass(slots=True)
class OutputItem:
    """kind: text, reasoning, function or custom: what is called.  name: of that.

    status, logprobs: for formats that tell of them."""

    kind: str
    index: int
    name: str = ""
    text: str = ""
    is_complete: bool = False
    status: str = "in_progress"
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_call(self) -> bool:
        return self.kind in ("function", "custom")

    @property
    def call_id(self) -> str:
        return f"call_{self.mark[:24]}"

    def call(self) -> dict[str, Any]:
        """The call as chats have it."""
        given = "input" if self.kind == "custom" else "arguments"
        said = {"name": self.name, given: self.text}
        return {"id": self.call_id, "type": self.kind, self.kind: said}


News = Iterator[tuple[str, OutputItem, str]]


def grow(items: list[OutputItem], delta: Delta) -> News:
    """Grow the items of an answer; yields each that has ended, begun or grown, by what."""
    call = delta.call
    if call is None and not delta.text:
        return
    name = None if call is None else call.name
    if name is not None or not items or items[-1].kind != delta.kind:  # it begins
        yield from (("ended", last, "") for last in items[-1:])
        yield "begun", begin(items, delta.kind, name or ""), ""
    items[-1].text += delta.text
    items[-1].is_complete = call is not None and call.is_end
    yield "grown", items[-1], delta.text


def begin(items: list[OutputItem], kind: str, name: str = "") -> OutputItem:
    """The next item."""
    items.append(OutputItem(kind, len(items), name))
    return items[-1]


@dataclass
class Writer:
    """Writes one answer in the format of one endpoint: `whole`, or the others in their order."""

    _request: Any
    _generation: Generation
    _request_id: str
    _created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer to a request without `stream`."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """The events before the first token."""
        raise NotImplementedError

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        """The events for what is new."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """The events that end a stream without errors."""
        raise NotImplementedError

    def failing(self, error: DrafthouseError) -> bytes:
        """The events that end a stream with an error instead."""
        raise NotImplementedError


@dataclass
class ItemWriter(Writer):
    """Writes an answer that is told item by item."""

    _items: list[OutputItem] = field(default_factory=list)
    _last: Delta = field(default_factory=lambda: Delta(0))

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            self._take(delta)
            events += [self._told(*news) for news in grow(self._items, delta)]
        return b"".join(events)

    def _take(self, delta: Delta) -> None:
        self._last = delta

    def _told(self, what: str, item: OutputItem, text: str) -> bytes:
        """The events for an item that has `begun`, `grown` by the text, or `ended`."""
        raise NotImplementedError

    def _filled(self) -> bytes:
        """The events for an answer without a word, which is an empty text."""
        return b"" if self._items else self._told("begun", begin(self._items, "text"), "")


def event(kind: str, **fields: Any) -> bytes:
    """An event of a stream that names its events."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
