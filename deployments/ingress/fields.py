"""Reads the fields of one JSON object from a client by type; raises RequestError for wrong ones.

A message names the field, the value and the remedy.  Values are shortened, and those of fields with
prompt text are described only by their type, so that no text reaches a log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from cluster.errors import RequestError

T = TypeVar("T")

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

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number in [low, high]; NaN is refused."""
        value = self._values.get(key)
        if value is None:
            return default
        name = self.name(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError.at(
                name, f"{shown(value)} is not a number; send {_interval(low, high)}"
            )
        if not low <= value <= high:
            raise RequestError.at(
                name, f"{shown(value)} is out of range; send {_interval(low, high)}"
            )
        return float(value) + 0.0  # -0.0 is 0

    def integer(self, key: str, default: int | None, low: int, high: int) -> int | None:
        """An integer in [low, high]; floats and booleans are refused."""
        value = self._values.get(key)
        if value is None:
            return default
        name = self.name(key)
        remedy = f"send an integer from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError.at(name, f"{shown(value)} is not an integer; {remedy}")
        if not low <= value <= high:
            raise RequestError.at(name, f"{_digits(value)} is out of range; {remedy}")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            name = self.name(key)
            raise RequestError.at(name, f"{shown(value)} is not a boolean; send true or false")
        return value

    def string(self, key: str, default: str, max_len: int = 256) -> str:
        value = self._values.get(key)
        if value is None:
            return default
        name = self.name(key)
        if not isinstance(value, str):
            raise RequestError.at(name, f"{shown(value)} is not a string")
        if len(value) > max_len:
            raise RequestError.at(name, f"{len(value)} characters; send at most {max_len}")
        return encodable(value, name)

    def strings(self, key: str, max_items: int, max_len: int = 256) -> tuple[str, ...] | None:
        """A list of strings, None if absent."""
        value = self._values.get(key)
        if value is None:
            return None
        name = self.name(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RequestError.at(name, f"{shown(value)} is not a list of strings")
        if len(value) > max_items:
            raise RequestError.at(name, f"{len(value)} items; send at most {max_items}")
        if any(len(item) > max_len for item in value):
            raise RequestError.at(name, f"an item is longer than {max_len} characters; shorten it")
        return tuple(encodable(item, name) for item in value)

    def integers(self, key: str, max_items: int, low: int, high: int) -> tuple[int, ...]:
        """A list of integers in [low, high], () if absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        name = self.name(key)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise RequestError.at(name, f"{shown(value)} is not a list of integers")
        if len(value) > max_items:
            raise RequestError.at(name, f"{len(value)} items; send at most {max_items}")
        for item in value:
            if not low <= item <= high:
                raise RequestError.at(
                    name, f"{_digits(item)} is out of range; send {low} to {high}"
                )
        return tuple(value)


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


def _interval(low: float, high: float) -> str:
    return f"a number from {low:g} to {high:g}"


def _digits(value: int) -> str:
    # Formatting a huge integer takes quadratic time, and Python refuses it above a limit.
    return str(value) if value.bit_length() <= 128 else f"a {value.bit_length()}-bit integer"
