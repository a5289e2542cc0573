"""Reads the fields of one JSON object from a client by type; raises RequestError for wrong ones.

A message names the field, the value and the remedy.  Values are shortened, and those of fields with
prompt text are described only by their type, so that no text reaches a log.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from cluster.errors import RequestError

T = TypeVar("T")

# Of a client's own names.
MAX_SHOWN_KEY_LEN = 40

_JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


def json_kind(value: Any) -> str:
    """The JSON type of `value`, with an article."""
    return _JSON_NAMES.get(type(value), type(value).__name__)


def shown(value: Any) -> str:
    """`value` for an error message: at most 60 characters, containers only by their type."""
    if isinstance(value, dict | list):
        return json_kind(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Fields:
    """One JSON object; `path` is its location in the request ("" for the body itself).

    Every method returns `default` if the key is absent or null.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    @classmethod
    def of(cls, value: Any, path: str) -> Fields:
        """Read `value` as an object; raises RequestError if it is not one."""
        if not isinstance(value, dict):
            raise RequestError.at(path, f"{json_kind(value)}; send an object")
        return cls(value, path)

    def name(self, key: str) -> str:
        """The key's full path, for messages and the error's `param`."""
        return f"{self._path}.{key}" if self._path else key

    def values(self) -> Mapping[str, Any]:
        """The object itself."""
        return self._values

    def get(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self._values.get(key)

    def refuse_others(self, *names: str) -> None:
        """Raise RequestError for the first key that is not one of `names`."""
        for key in self._values:
            if key not in names:
                raise unknown(self.name(key[:MAX_SHOWN_KEY_LEN]), key, names)

    def wrong(self, key: str, reason: str) -> RequestError:
        """The error of a key's value."""
        return RequestError.at(self.name(key), reason)

    def object(self, key: str) -> Fields | None:
        """An object, None if absent."""
        value = self._values.get(key)
        return None if value is None else Fields.of(value, self.name(key))

    def listed(self, key: str) -> list[Any] | None:
        """A list of anything, None if absent."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(key, f"{json_kind(value)}; send a list")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number in [low, high]; NaN is refused."""
        value = self._values.get(key)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            what = "out of range" if is_number else "not a number"
            remedy = f"send a number from {low:g} to {high:g}"
            raise self.wrong(key, f"{shown(value)} is {what}; {remedy}")
        return float(value) + 0.0  # -0.0 is 0

    def integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        """An integer in [low, high]; floats and booleans are refused."""
        value = self._values.get(key)
        if value is None:
            return default
        remedy = f"send an integer from {low} to {high}"
        if type(value) is not int:
            raise self.wrong(key, f"{shown(value)} is not an integer; {remedy}")
        if not low <= value <= high:
            raise self.wrong(key, f"{_digits(value)} is out of range; {remedy}")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"{shown(value)} is not a boolean; send true or false")
        return value

    def string(self, key: str, default: str, max_len: int = 256) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, f"{shown(value)} is not a string")
        if len(value) > max_len:
            raise self.wrong(key, f"{len(value)} characters; send at most {max_len}")
        return encodable(value, self.name(key))

    def strings(self, key: str, max_items: int, max_len: int = 256) -> tuple[str, ...] | None:
        """A list of strings, None if absent."""
        value = self._items(key, str, "strings", max_items)
        if value is None:
            return None
        if any(len(item) > max_len for item in value):
            raise self.wrong(key, f"an item is longer than {max_len} characters; shorten it")
        return tuple(encodable(item, self.name(key)) for item in value)

    def integers(self, key: str, max_items: int, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high], () if absent."""
        value = self._items(key, int, "integers", max_items) or []
        for item in value:
            if not low <= item <= high:
                raise self.wrong(key, f"{_digits(item)} is out of range; send {low} to {high}")
        return tuple(value)

    def _items(self, key: str, kind: type, what: str, max_items: int) -> list[Any] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.wrong(key, f"{shown(value)} is not a list of {what}")
        if len(value) > max_items:
            raise self.wrong(key, f"{len(value)} items; send at most {max_items}")
        return value


def unknown(name: str, key: str, known: Iterable[str]) -> RequestError:
    """The error of a key that is none of those that are known; name: with its path."""
    near = difflib.get_close_matches(key[:MAX_SHOWN_KEY_LEN], [*known], n=1, cutoff=0.6)
    return RequestError.at(
        name, "unknown field; " + (f"did you mean {near[0]}?" if near else "remove it")
    )


def encodable(text: str, name: str) -> str:
    """Return `text` if it is valid Unicode; JSON can contain half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError.at(
            name, "contains half of a surrogate pair; send valid Unicode"
        ) from None
    return text


def encodable_json(value: T, name: str) -> T:
    """Return a value of JSON if all texts in it are valid Unicode."""
    encodable(json.dumps(value, ensure_ascii=False), name)
    return value


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair that stands alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _digits(value: int) -> str:
    # Formatting a huge integer takes quadratic time, and Python refuses it above a limit.
    return str(value) if value.bit_length() <= 128 else f"a {value.bit_length()}-bit integer"
