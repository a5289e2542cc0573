"""Words for what a client has sent, in errors: shortened, and never a text of its own; and what a
body calls the fields that are found wrong only when its request runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any

from cluster.errors import RequestError, did_you_mean
from cluster.records import frozen


@frozen
class Names:
    """own: a path as the parsers know it, to that in the body; what lies below it moves with it.

    What runs a request knows fields by the names of OpenAI's chats and completions.  An error that
    it raises is raised again with the field of the body; its other words are never touched.
    """

    own: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """`path` as the body has it."""
        known = path
        while known and known not in self.own:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return self.own[known] + path[len(known) :] if known else path

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """RequestErrors that are raised inside name the body's field."""
        try:
            yield
        except RequestError as error:
            own = None if error.param is None else self.of(error.param)
            if own is None or own == error.param:
                raise
            raise type(error)(f"{own}: {error.reason}", param=own) from None


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
    if isinstance(value, int) and value.bit_length() > 128:
        # Formatting a huge integer takes quadratic time, and Python refuses it above a limit.
        return f"a {value.bit_length()}-bit integer"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown(name: str, key: str, known: Iterable[str]) -> RequestError:
    """The error of a key that is none of those that are known; name: with its path."""
    hint = did_you_mean(key[:MAX_SHOWN_KEY_LEN], known) or "remove it"
    return RequestError.at(name, f"unknown field; {hint}")


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair that stands alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
