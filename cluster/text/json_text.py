"""JSON that clients send, as a body or as a text in one: of bounded depth, its numbers finite, its
texts valid Unicode."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from cluster.errors import RequestError
from cluster.records import frozen

# Levels of containers.  Templates, encoders and compilers of grammars call themselves a few times
# for each level, and Python allows a thousand calls.
MAX_DEPTH = 100
# A value that is nested too deeply is named by its first keys: `tools[0].function.parameters`.
_NAMED_KEYS = 4
_MAX_SHOWN = 40
# Half of a surrogate pair comes by such an escape alone: UTF-8 has none.
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")

_Path = tuple[str | int, ...]


@frozen
class _Unusable:
    """A number that cannot be taken, as it was written."""

    written: str


def parse_json(text: str, name: str) -> Any:
    """The value in `text`; raises RequestError, with the place, where there is none.

    name: the field that `text` is the value of, "" = it is the body, whose own fields are named.
    """
    try:
        return _load(text, name)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise _wrong(name, f"not valid JSON: {where}", "the body is") from None


def json_or_text(text: str, name: str) -> Any:
    """As `parse_json`, but a text that is no JSON is returned itself."""
    try:
        return _load(text, name)
    except json.JSONDecodeError:
        return text


def _load(text: str, name: str) -> Any:
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise _too_deep(name) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise _unusable(text, name) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be deep
        _check_depth(value, name)
    if _ESCAPED.search(text):
        _check_characters(value, name)
    return value


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError
    return value


def _check_depth(value: Any, name: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for each in children for one in each if isinstance(one, dict | list)]
        if not level:
            return
    deep = next(path for path, _ in _walk(value) if len(path) >= MAX_DEPTH)
    raise _too_deep(name or _place(deep[:_NAMED_KEYS]))


def _check_characters(value: Any, name: str) -> None:
    for path, each in _walk(value):
        texts = each if isinstance(each, dict) else (each,)
        if any(isinstance(text, str) and _HALF.search(text) for text in texts):
            place = name or _place(path)
            raise _wrong(place, "contains half of a surrogate pair; send valid Unicode")


def _too_deep(place: str) -> RequestError:
    reason = f"nested too deeply, beyond {MAX_DEPTH} levels; flatten it"
    return _wrong(place, reason, "the body is")


def _wrong(place: str, reason: str, whole: str = "the body:") -> RequestError:
    """place: "" = the body, which the message calls `whole`."""
    return RequestError(f"{f'{place}:' if place else whole} {reason}", param=place or None)


def _unusable(text: str, name: str) -> RequestError:
    """The error for a text with a number that is not finite; reads it again to find which."""

    def of_float(written: str) -> Any:
        return None if math.isfinite(float(written)) else _Unusable(written)

    def of_integer(written: str) -> Any:
        try:
            int(written)
        except ValueError:  # Python takes no more than some thousand digits
            return _Unusable(written)

    value = json.loads(text, parse_float=of_float, parse_int=of_integer, parse_constant=_Unusable)
    found = ((path, each) for path, each in _walk(value) if isinstance(each, _Unusable))
    # Of a key that stands twice only the last value is left.
    path, number = next(found, ((), _Unusable("one of its numbers")))
    place, written = name or _place(path), number.written
    if len(written) > _MAX_SHOWN:
        written = f"a number of {len(written)} characters"
    return _wrong(place, f"{written} is no finite number; send one that fits double precision")


def _walk(value: Any) -> Iterator[tuple[_Path, Any]]:
    """Everything in `value` with its path, in no particular order."""
    pending: list[tuple[_Path, Any]] = [((), value)]
    while pending:
        path, each = pending.pop()
        yield path, each
        if isinstance(each, dict | list):
            inner = each.items() if isinstance(each, dict) else enumerate(each)
            pending += [((*path, key), one) for key, one in inner]


def _place(path: _Path) -> str:
    """As errors name it: `tools[0].function`."""
    steps = (f"[{key}]" if isinstance(key, int) else f".{key[:_MAX_SHOWN]}" for key in path)
    return "".join(steps).removeprefix(".")
