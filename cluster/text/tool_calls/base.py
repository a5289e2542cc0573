"""Tool calls in the text of a model: the parts that all formats share.

One rule holds for all formats, and depends on the text alone, never on the pieces it comes in:

* A call reaches from its opening marker to its last closing one, as the format's file says, and has
  a name that a tool may have (`NAME`).
* All other text is the answer's, to the character: markers without a call, too.
* White space alone, before, between or behind calls, is layout and no text.  An answer without
  calls keeps all of its own.

A call is reported as soon as its name is known and its arguments begin.  It stays a call if its
arguments turn out to be no JSON, or are cut off.  Until then it is held back: it may be text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

from cluster.records import frozen

# The names that tools may have.
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


# Markers in a text that comes in pieces.


def held_len(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    sizes = (
        size
        for marker in markers
        for size in range(1, min(len(marker), len(text) + 1))
        if text.endswith(marker[:size])
    )
    return max(sizes, default=0)


def first_of(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where the first marker in the text stands, and which it is; None without one."""
    places = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
    if not places:
        return None
    at, _, marker = min(places)
    return at, marker


@frozen
class Part:
    """New text of an answer, and what it is of.

    kind: text, reasoning, function (a call, whose arguments the text is of) or custom (a call of a
    tool that takes one text).  Of a call: index: which of the answer's.  name: with its first part.
    is_end: the arguments are complete; without it, the answer has ended within the call.
    """

    text: str
    kind: str = "text"
    index: int = 0
    name: str | None = None
    is_end: bool = False

    @property
    def is_call(self) -> bool:
        return self.kind in ("function", "custom")


NOTHING = Part("")

Result = TypeVar("Result")
# Reads a source: yields what it finds, and None where it needs more text to decide.
Reads = Generator[Part | None, None, Result]


class UnreadText:
    """The text of an answer that is not read yet.  is_whole: no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.is_whole = False
        self.num_calls = 0

    def take(self, size: int) -> str:
        """The first `size` characters, which are read now."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def called(self, name: str | None, arguments: str = "", *, is_end: bool = False) -> Part:
        """The first part of the next call; without a name one more of the last."""
        self.num_calls += name is not None
        return Part(arguments, "function", self.num_calls - 1, name, is_end)

    def after_space(self, at: int) -> Reads[int]:
        """Where the white space that begins at `at` ends."""
        while True:
            at = len(self.text) - len(self.text[at:].lstrip())
            if at < len(self.text) or self.is_whole:
                return at
            yield None

    def has(self, marker: str, at: int) -> Reads[bool]:
        """True if `marker` stands at `at`."""
        while not self.is_whole and len(self.text) - at < len(marker):
            if not marker.startswith(self.text[at:]):
                return False
            yield None
        return self.text.startswith(marker, at)

    def until(self, markers: Sequence[str], part: Callable[[str], Part]) -> Reads[str]:
        """Give the text before the first of `markers` as `part`s; returns it, "" at the end."""
        while True:
            found = first_of(self.text, markers)
            if found is not None:
                at, marker = found
                if at:
                    yield part(self.take(at))
                return marker
            held = 0 if self.is_whole else held_len(self.text, markers)
            ready = self.take(len(self.text) - held)
            if ready:
                yield part(ready)
            if self.is_whole:
                return ""
            yield None

    def take_ends(self, ends: Sequence[str]) -> Reads[None]:
        """Take the closing markers of the call just read: each of `ends` that follows, in order."""
        for end in ends:
            at = yield from self.after_space(0)
            if (yield from self.has(end, at)):
                self.take(at + len(end))


# Reads the call whose marker, of that length, the source begins with.  Returns None, or the number
# of characters that are text where it is no call.
ReadsCall = Callable[[UnreadText, int], Reads[int | None]]


def marked_calls(
    source: UnreadText, markers: Sequence[str], call: ReadsCall, ends: Sequence[str] = ()
) -> Reads[None]:
    """Read a text with calls that begin with one of `markers`, anywhere in it.

    ends: as of `UnreadText.take_ends`.
    """
    while marker := (yield from source.until(markers, Part)):
        text_len = yield from call(source, len(marker))
        if text_len is None:
            yield from source.take_ends(ends)
        else:
            yield Part(source.take(text_len))


@frozen
class CallFormat:
    """How one family of models writes its calls.

    read: reads the text of an answer.  tags: for a tool's name, the texts before and after the
    arguments.  separator: between calls.  trigger: what every call begins with.  begin, end: around
    all the calls of an answer.
    """

    name: str
    read: Callable[[UnreadText], Reads[None]]
    tags: Callable[[str], tuple[str, str]]
    trigger: str
    separator: str = ""
    begin: str = ""
    end: str = ""

    def grammar(
        self,
        tools: Sequence[tuple[str, Any]],
        *,
        is_required: bool,
        is_parallel: bool,
        form: Any = None,
    ) -> str:
        """A structural tag: calls of these tools (name, JSON schema of the arguments).

        is_required: calls alone, at least one; else free text, whose calls are valid.
        form: a JSON schema of what may stand in place of the calls; then there is no free text.
        """
        tags = []
        for name, schema in tools:
            before, after = self.tags(name)
            content = {"type": "json_schema", "json_schema": schema}
            tags.append({"type": "tag", "begin": before, "content": content, "end": after})
        if is_required or form is not None:
            calls: Any = {
                "type": "tags_with_separator",
                "tags": tags,
                "separator": self.separator,
                "at_least_one": True,
                "stop_after_first": not is_parallel,
            }
            begin, end = (
                [{"type": "const_string", "value": text}] if text else []
                for text in (self.begin, self.end)
            )
            elements = [*begin, calls, *end]
            layout = calls if len(elements) == 1 else {"type": "sequence", "elements": elements}
            if form is not None:
                text = {"type": "json_schema", "json_schema": form}
                layout = {"type": "or", "elements": [text, layout]}
        else:
            layout = {
                "type": "triggered_tags",
                "triggers": [self.trigger],
                "tags": tags,
                "stop_after_first": False,
            }
        return json.dumps({"type": "structural_tag", "format": layout})


def json_tags(key: str, before: str = "", after: str = "") -> Callable[[str], tuple[str, str]]:
    """Tags of calls that are JSON objects of a name and, under `key`, the arguments."""

    def tags(name: str) -> tuple[str, str]:
        return f'{before}{{"name": {json.dumps(name)}, "{key}": ', f"}}{after}"

    return tags
