"""Reads the text of an answer: what of it is text, reasoning and calls, and what its client sees of
that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.text.prompt import ChatUse
from cluster.text.tool_calls.base import Part, Reads, UnreadText
from cluster.text.tool_calls.json_call import TextArgument


def all_text(source: UnreadText) -> Reads[str]:
    """Read an answer that is all of its text."""
    return source.until((), Part)


class AnswerReader:
    """Reads the text of one answer, piece by piece.

    has_calls: some came.  is_cut: the text so far ends within a call, or before one that is forced.
    """

    def __init__(self, read: Callable[[UnreadText], Reads[object]], use: ChatUse) -> None:
        self._source = UnreadText()
        self._use = use
        self._parts = read(self._source)
        self._space = ""  # white space that a stretch of text has begun with
        # The stretch has nothing else so far, and calls may come, for which that is layout.
        self._is_space = read is not all_text
        self._argument: TextArgument | None = None  # of the call that is being read
        self.has_calls = self.is_cut = False

    def push(self, text: str) -> list[Part]:
        """The parts that new text brings, in its order."""
        self._source.text += text
        return list(self._found())

    def finish(self) -> list[Part]:
        """End the text; returns the parts that were held back."""
        self._source.is_whole = True
        parts = list(self._found())
        if self._space and not self._source.num_calls:
            parts.append(Part(self._space))
        if not self._use.is_forced:
            return parts
        # Text at the end is then the beginning of a call.
        calls = [part for part in parts if part.kind != "text"]
        self.is_cut |= len(calls) < len(parts) or not self.has_calls
        return calls

    def _found(self) -> Iterator[Part]:
        use = self._use
        for part in self._parts:
            if part is None:
                return
            if part.is_call:
                self._space, self._is_space = "", True
                if use.reads_calls and (use.is_parallel or part.index == 0):
                    self.has_calls, self.is_cut = True, not part.is_end
                    yield self._as_text(part)
                continue
            if self._is_space and part.kind == "text":
                self._space += part.text
                if part.text.isspace():
                    continue
                part = Part(self._space)
                self._space, self._is_space = "", False
            if use.shows_reasoning or part.kind == "text":
                yield part

    def _as_text(self, part: Part) -> Part:
        """A piece of a call, with the text of its arguments where it is of a custom tool."""
        if part.name is not None:
            self._argument = TextArgument() if part.name in self._use.custom else None
        if self._argument is None:
            return part
        text = self._argument.push(part.text, is_end=part.is_end)
        return replace(part, kind="custom", text=text)
