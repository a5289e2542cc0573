"""Tool calls in the text of a model: what every format gives, and what they share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.text.markers import first_of, held_len


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of one call.  index: of the call in the answer.  name: with its first piece."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What new text has brought.  text, reasoning: of the answer.  calls: in order."""

    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    reasoning: str = ""


class CallParser(Protocol):
    """Reads the text of one answer, piece by piece.  What is no call stays text."""

    def push(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """The text has ended: what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of models writes its calls.

    tags: for a tool's name, the texts before and after the arguments.  separator: between calls.
    trigger: what every call begins with.  begin, end: around all the calls of an answer.
    """

    name: str
    parser: Callable[[], CallParser]
    tags: Callable[[str], tuple[str, str]]
    trigger: str
    separator: str = ""
    begin: str = ""
    end: str = ""

    def grammar(
        self, tools: Sequence[tuple[str, Any]], *, is_required: bool, is_parallel: bool
    ) -> str:
        """A structural tag: calls of these tools (name, JSON schema of the arguments).

        is_required: calls alone, at least one; else free text, whose calls are valid.
        """
        tags = []
        for name, schema in tools:
            before, after = self.tags(name)
            content = {"type": "json_schema", "json_schema": schema}
            tags.append({"type": "tag", "begin": before, "content": content, "end": after})
        if is_required:
            calls: Any = {
                "type": "tags_with_separator", "tags": tags, "separator": self.separator,
                "at_least_one": True, "stop_after_first": not is_parallel,
            }  # fmt: skip
            around = [("begin", self.begin), ("end", self.end)]
            begin, end = (
                [{"type": "const_string", "value": text}] if text else [] for _, text in around
            )
            elements = [*begin, calls, *end]
            layout = calls if len(elements) == 1 else {"type": "sequence", "elements": elements}
        else:
            layout = {
                "type": "triggered_tags", "triggers": [self.trigger], "tags": tags,
                "stop_after_first": False,
            }  # fmt: skip
        return json.dumps({"type": "structural_tag", "format": layout})


def json_tags(key: str, before: str = "", after: str = "") -> Callable[[str], tuple[str, str]]:
    """Tags of calls that are JSON objects of a name and, under `key`, the arguments."""

    def tags(name: str) -> tuple[str, str]:
        return f'{before}{{"name": {json.dumps(name)}, "{key}": ', f"}}{after}"

    return tags


class JsonValue:
    """Finds the end of the JSON object or list that a text begins with."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_over = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to it."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_over = True
                    return place + 1
        return len(text)


_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)


@dataclass(slots=True)
class JsonCall:
    """One call as a JSON object: its name, and then its arguments as they come.

    A call that has its arguments before its name is read when it is complete.
    """

    index: int
    _buffer: str = ""
    _arguments: JsonValue | None = None
    _whole: JsonValue = field(default_factory=JsonValue)
    is_named: bool = False
    is_over: bool = False

    def push(self, text: str) -> tuple[list[CallPiece], str]:
        """The new pieces, and the text after the call."""
        used = self._whole.push(text)
        mine, rest = text[:used], text[used:]
        pieces: list[CallPiece] = []
        self._buffer += mine
        if not self.is_named:
            head = _HEAD.match(self._buffer)
            # Which value it is shows with its first character.
            if head is not None and self._buffer[head.end() : head.end() + 1] in ("{", "["):
                self.is_named = True
                self._arguments = JsonValue()
                pieces.append(CallPiece(self.index, json.loads(head.group(1))))
                self._buffer = self._buffer[head.end() :]
        if self._arguments is not None and not self._arguments.is_over and self._buffer:
            taken = self._arguments.push(self._buffer)
            pieces.append(CallPiece(self.index, arguments=self._buffer[:taken]))
            self._buffer = ""
        if self._whole.is_over:
            self.is_over = True
            if not self.is_named:
                pieces += self._read_whole()
        return pieces, rest

    def _read_whole(self) -> list[CallPiece]:
        try:
            call = json.loads(self._buffer)
            arguments = call.get("arguments", call.get("parameters", {}))
            name = call["name"]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return []
        if not isinstance(name, str):
            return []
        self.is_named = True
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return [CallPiece(self.index, name, text)]

    @property
    def unread(self) -> str:
        """The text of something that is no call."""
        return "" if self.is_named else self._buffer


class MarkedJsonCalls:
    """A parser for calls that are JSON objects, each after `marker`.

    ends: texts after a call that belong to no answer.
    """

    def __init__(self, marker: str, ends: Sequence[str]) -> None:
        self._marker = marker
        self._ends = tuple(ends)
        self._held = ""
        self._call: JsonCall | None = None
        self._num_calls = 0

    def push(self, text: str) -> Parsed:
        text, self._held = self._held + text, ""
        answer, pieces = "", []
        while text:
            if self._call is not None:
                new, text = self._call.push(text)
                pieces += new
                if self._call.is_over:
                    answer += self._closed()
                continue
            found = first_of(text, (self._marker, *self._ends))
            if found is None:
                held = held_len(text, (self._marker, *self._ends))
                answer, self._held = answer + text[: len(text) - held], text[len(text) - held :]
                break
            before, marker, text = found
            answer += before
            if marker == self._marker:
                self._call = JsonCall(self._num_calls)
        if self._num_calls or self._call is not None:
            answer = answer if answer.strip() else ""
        return Parsed(answer, tuple(pieces))

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        return Parsed(rest + (self._closed() if self._call is not None else ""))

    def _closed(self) -> str:
        """The call is over; the text of one that was none."""
        call, self._call = self._call, None
        assert call is not None
        self._num_calls += call.is_named
        return "" if call.is_named else self._marker + call.unread
