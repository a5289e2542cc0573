"""Plain YAML data to dataclasses, strictly: every deviation is a ConfigError with its path.

A field's type says all that is checked of its value; what Python's types cannot say stands in
`Annotated`, as a mark: a function of the value that raises ConfigError, or returns what is used.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from cluster.errors import ConfigError, did_you_mean, joined
from cluster.records import frozen

T = TypeVar("T")

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string; put it in quotes",
    bool: "true or false",
}


@frozen
class Range:
    """A mark of numbers: from `low` to `high`, both included unless it is open."""

    low: float
    high: float = math.inf
    is_open: bool = False

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{'above' if self.is_open else 'at least'} {self.low:g}"
        excluded = ", both excluded" if self.is_open else ""
        return f"between {self.low:g} and {self.high:.10g}{excluded}"

    def __call__(self, value: float) -> float:
        """Return a value inside; raises ConfigError for another."""
        low, high = self.low, self.high
        # NaN is outside too: no comparison with it is true.
        is_inside = low < value < high if self.is_open else low <= value <= high
        if not is_inside:
            raise ConfigError(f"{value:g} is out of range; it must be {self}")
        return value


@frozen
class Readable:
    """A mark of texts that `read` can read: it returns what stands in a text's place, and raises
    with the remedy for others.  is_secret: the refusal does not repeat them."""

    form: str
    read: Callable[[str], str]
    is_secret: bool = False

    def __str__(self) -> str:
        return f"({self.form})"

    def __call__(self, value: str) -> str:
        """Return the text to use; raises ConfigError for one of another form."""
        try:
            return self.read(value)
        except (ValueError, OSError) as error:
            shown = "it" if self.is_secret else repr(value)
            raise ConfigError(f"{shown} is no {self.form}: {error}") from error


def matching(pattern: str, remedy: str) -> Callable[[str], str]:
    """Return what reads a text that matches a pattern; it raises ValueError for another."""

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(remedy)
        return text

    return read


def _line_of(text: str) -> str:
    """Return a text of one line, which names, logs and headers take; ValueError for another."""
    if not text.isprintable():
        raise ValueError("it has a line break or another sign that is not printed; leave it out")
    return text


def _folder_of(text: str) -> str:
    """Return where a folder is, or can be made; ValueError where a file lies."""
    path = Path(text)
    found = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise ValueError("it, or what is to hold it, is a file; name another place")
    return text


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
NonNegativeFloat = Annotated[float, Range(0)]
# Eleven days: the clocks that wait take no number whatever.
MAX_SECONDS = 1e6
Seconds = Annotated[float, Range(0, MAX_SECONDS)]
Share = Annotated[float, Range(0, 1)]
Nice = Annotated[int, Range(0, 19)]
OpenShare = Annotated[float, Range(0, 1, is_open=True)]
Port = Annotated[int, Range(1, 65535)]
Line = Annotated[str, Readable("line of text", _line_of)]
Folder = Annotated[str, Readable("folder", _folder_of)]
# Names become parts of Serve deployment names and of metric labels.
NAME = Readable(
    "name of letters, digits, _ and -",
    matching("[A-Za-z0-9][A-Za-z0-9_-]*", "begin with a letter or digit, and leave others out"),
)
Name = Annotated[str, NAME]


def parse(kind: type[T], value: Any, path: str = "") -> T:
    """Build the dataclass `kind` from plain YAML data; every deviation is a ConfigError.

    path: where `value` stands in the file, for messages.
    """
    with ConfigError.below(path):
        return _parse(kind, value)


def overlaid(base: T, value: Any, path: str = "") -> T:
    """Return the dataclass `base` with the keys that `value` has, as strictly as `parse`.

    Of sections, what `value` does not name stays as it is; every other value stands in place of the
    former."""
    with ConfigError.below(path):
        former = {key: getattr(base, name) for key, name in _names(base).items()}
        told = {
            key: overlaid(former[key], item, key)
            if dataclasses.is_dataclass(former.get(key))
            else item
            for key, item in mapping(value).items()
        }
        return parse(type(base), {**former, **told})


def mapping(value: Any, path: str = "") -> Mapping[str, Any]:
    """`value`, or an empty mapping for a key whose block was left empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError.at(path, f"{value!r} is not a mapping")
    for key in value:
        check_that(
            isinstance(key, str),
            path,
            f"the key that YAML reads as {key!r} is no text; put it in quotes",
        )
    return value


def check_keys(section: Mapping[str, Any], known: Collection[str], path: str = "") -> None:
    """Raise ConfigError for a key that is not known, with the nearest one that is."""
    for key in section:
        check_known(key, known, joined(path, key), "unknown key", "known keys")


def check_that(holds: object, path: str, reason: str) -> None:
    """Raise ConfigError where a rule does not hold."""
    if not holds:
        raise ConfigError.at(path, reason)


def check_known(name: str, known: Collection[str], path: str, reason: str, title: str) -> None:
    """Raise ConfigError for a name that is not known, with the nearest one that is, or after
    `title` with all."""
    if name not in known:
        hint = did_you_mean(name, known) or f"{title}: {', '.join(known) or 'none'}"
        raise ConfigError.at(path, f"{reason} ({hint})")


def is_text(kind: Any, keys: Sequence[str]) -> bool:
    """True if the dataclass `kind` has a text where these keys lead."""
    for key in keys:
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(_names(kind).get(key, ""))
        else:
            kind = (get_args(kind) or (None,))[-1]
    return kind is str


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key of a field in YAML: its name, without the "_" behind a word that Python keeps."""
    return field.name.removesuffix("_")


def _parse(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _parse(arguments[0], value)
        for mark in arguments[1:]:
            found = mark(found)
        return found
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, value)
    if kind is Any:
        return value
    if origin is Literal:
        return _chosen((kind,), value)
    if origin in (Union, types.UnionType):
        return _chosen(arguments, value)
    if origin is not None and issubclass(origin, Mapping):
        keys, values = arguments
        return {
            parse(keys, key, key): parse(values, item, key) for key, item in mapping(value).items()
        }
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{value!r} is not a list")
        return tuple(parse(arguments[0], item, f"[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # bool is an int to isinstance, but not to an operator
        raise ConfigError(f"{value!r} is not {_TYPE_NAMES.get(kind, kind)}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{value} is out of range; it must be finite")
    return value


def _chosen(kinds: tuple[Any, ...], value: Any) -> Any:
    """Of words, of another type, of None: what the schema uses has one type beside the others."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    rest = [kind for kind in kinds if kind is not types.NoneType and get_origin(kind) != Literal]
    if value in words or (value is None and types.NoneType in kinds):
        return value
    if rest and not (words and isinstance(value, str)):
        return _parse(rest[0], value)
    known = [*map(str, words), *(_TYPE_NAMES.get(kind, "a mapping") for kind in rest)]
    raise ConfigError(f"{value!r} is none of: {', '.join(filter(None, known))}")


def _names(kind: Any) -> dict[str, str]:
    """Return the fields' names by their keys."""
    return {key_of(field): field.name for field in dataclasses.fields(kind)}


def _parse_dataclass(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):  # as `overlaid` leaves it
        return value
    hints, names = typing.get_type_hints(kind, include_extras=True), _names(kind)
    removed: Mapping[str, str] = getattr(kind, "REMOVED", {})
    found = {}
    for key, item in mapping(value).items():
        values = item if isinstance(item, list) else [item]
        said = [(f"{key}={each}", repr(each)) for each in values]
        for gone, named in ((key, "this key"), *said):
            if gone in removed:
                raise ConfigError.at(key, f"{named} is gone; {removed[gone]}")
        check_known(key, names, key, "unknown key", "known keys")
        found[names[key]] = parse(hints[names[key]], item, key)
    return kind(**found)
