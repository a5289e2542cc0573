"""Calls that begin with a marker and a name, and whose arguments follow as a JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.text.markers import first_of, held_len
from cluster.text.tool_calls.base import CallPiece, JsonValue, Parsed


class NamedCalls:
    """A parser.  start: before a call.  name_of: the name in what stands before the arguments.

    dropped: texts that belong to no answer.
    """

    def __init__(
        self, start: str, name_of: Callable[[str], str], dropped: Sequence[str] = ()
    ) -> None:
        self._start = start
        self._name_of = name_of
        self._dropped = tuple(dropped)
        self._held = ""
        self._head: str | None = None  # before the arguments; None outside of a call's head
        self._arguments: JsonValue | None = None
        self._num_calls = 0

    def push(self, text: str) -> Parsed:
        text, self._held = self._held + text, ""
        answer, pieces = "", []
        while text:
            if self._arguments is not None:
                used = self._arguments.push(text)
                pieces.append(CallPiece(self._num_calls - 1, arguments=text[:used]))
                text = text[used:]
                if self._arguments.is_over:
                    self._arguments = None
            elif self._head is not None:
                self._head += text
                head, found_brace, rest = self._head.partition("{")
                if not found_brace:
                    break
                text = "{" + rest
                pieces.append(CallPiece(self._num_calls, self._name_of(head)))
                self._num_calls += 1
                self._head, self._arguments = None, JsonValue()
            else:
                markers = (self._start, *self._dropped)
                found = first_of(text, markers)
                if found is None:
                    held = held_len(text, markers)
                    self._held = text[len(text) - held :]
                    answer, text = answer + text[: len(text) - held], ""
                    continue
                before, marker, text = found
                answer += before
                if marker == self._start:
                    self._head = ""
        if self._num_calls or self._head is not None:
            answer = answer if answer.strip() else ""
        return Parsed(answer, tuple(pieces))

    def finish(self) -> Parsed:
        rest, self._held = self._held, ""
        if self._head is not None:
            rest, self._head = self._start + self._head, None
        return Parsed(rest)
