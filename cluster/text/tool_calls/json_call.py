"""Calls that are JSON objects, those that name a function before them, and the arguments of any."""

from __future__ import annotations

import json
import re

from cluster.text.tool_calls.base import NAME, Reads, UnreadText


class JsonValue:
    """Finds the end of the JSON object or list that a text begins with."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_over = False

    def push(self, text: str) -> int:
        """The number of characters of `text` that belong to it."""
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


# What stands before the text in arguments of one text, whatever a model calls it.
_TEXT_BEGIN = re.compile(r'\s*\{\s*"[^"\\]*"\s*:\s*"')
# As much of a JSON text as needs nothing behind it: half of a surrogate pair waits for the other.
_CERTAIN = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
)


class TextArgument:
    """The text in the arguments of a call that has one text, as they come.

    Arguments that are no such object are the text themselves: a model may forget to write one.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False

    def push(self, written: str, *, is_end: bool) -> str:
        """The text that more of the arguments brings."""
        self._held += written
        begin = None if self._is_inside else _TEXT_BEGIN.match(self._held)
        if begin is not None:
            self._held, self._is_inside = self._held[begin.end() :], True
        text = ""
        if self._is_inside and (certain := _CERTAIN.match(self._held)) is not None:
            text = json.loads(f'"{certain.group()}"', strict=False)
            self._held = self._held[certain.end() :]
        if not is_end:
            return text
        # An escape that is none, and what stands behind it, is passed on as it is.
        rest, self._held = self._held, ""
        if self._is_inside:
            rest = "" if rest.startswith('"') else rest.rstrip().removesuffix("}").rstrip()
        return text + rest.removesuffix('"')


# The beginning of a call whose arguments can be passed on as they come.
_HEAD = re.compile(
    rf'\{{\s*"name"\s*:\s*"({NAME.pattern})"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r'(?=\{\s*["}]|\[)'
)
# A longer one has white space that no model writes.  This bounds what a search costs.
_MAX_HEAD_LEN = 512
_MAX_NAMED_LEN = 256


def json_call(source: UnreadText, at: int) -> Reads[int | None]:
    """Read the object at `at`, behind white space: a call's name, and its arguments as they come.

    A call that has its arguments before its name is read when it is complete.
    """
    start = yield from source.after_space(at)
    if not source.text.startswith("{", start):
        return start
    value, end = JsonValue(), start
    while (head := _HEAD.match(source.text, start, start + _MAX_HEAD_LEN)) is None:
        end += value.push(source.text[end:])
        if value.is_over or source.is_whole:
            call = _whole_call(source.text[start:end])
            if call is None:
                return end
            source.take(end)
            yield source.called(*call, is_end=True)
            return None
        yield None
    source.take(head.end())
    yield source.called(head.group(1))
    yield from arguments(source)
    yield from _take_rest(source)
    return None


def arguments(source: UnreadText) -> Reads[None]:
    """Read the arguments that the source begins with; they are of the last call reported."""
    value = JsonValue()
    while True:
        piece = source.take(value.push(source.text))
        if piece:
            yield source.called(None, piece, is_end=value.is_over)
        if value.is_over or source.is_whole:
            return
        yield None


def _take_rest(source: UnreadText) -> Reads[None]:
    """Take what stands behind the arguments in the same object, if that is JSON."""
    end = yield from source.after_space(0)
    if source.text[end : end + 1] not in ("}", ","):
        return
    value = JsonValue()
    value.push("{")
    while True:
        end += value.push(source.text[end:])
        if value.is_over or source.is_whole:
            break
        yield None
    if value.is_over and _is_json(f'{{"":0{source.text[:end]}'):
        source.take(end)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _whole_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of an object, as they were written; None where it is no call."""
    try:
        call = json.loads(text)
        json.dumps(call, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    name, key = call.get("name"), "arguments" if "arguments" in call else "parameters"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    given = call.get(key)
    return name, given if isinstance(given, str) else _written(text, key) or "{}"


def _written(text: str, wanted: str) -> str:
    """The last value under a key of a JSON object, as it was written; "" where there is none."""
    decoder, at, found = json.JSONDecoder(), 1, ""
    while not text.startswith("}", at := _after_gap(text, at)):
        key, at = decoder.raw_decode(text, at)
        start = _after_gap(text, at)
        _, at = decoder.raw_decode(text, start)
        found = text[start:at] if key == wanted else found
    return found


def _after_gap(text: str, at: int) -> int:
    """Where the next key or value of an object begins, or its end."""
    return len(text) - len(text[at:].lstrip(" \t\r\n,:"))


def named_call(source: UnreadText, at: int, head: re.Pattern[str]) -> Reads[int | None]:
    """Read the call whose head is at `at`.

    head: all that stands before the arguments; its group is the name.
    """
    while (brace := source.text.find("{", at, at + _MAX_NAMED_LEN)) < 0:
        if source.is_whole or len(source.text) >= at + _MAX_NAMED_LEN:
            return at
        yield None
    found = head.fullmatch(source.text, at, brace)
    first = yield from source.after_space(brace + 1)
    if found is None or source.text[first : first + 1] not in ('"', "}"):
        return at
    source.take(brace)
    yield source.called(found.group(1))
    yield from arguments(source)
    return None
