"""Plain YAML data to dataclasses, strictly: every deviation is a ConfigError with its path.

A field's type says all that is checked of its value; what Python's types cannot say stands in
`Annotated`, as a mark that has the method `check`; what that returns, unless it is None, is used.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

from cluster.errors import ConfigError
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
            return f"at least {self.low:g}"
        excluded = ", both excluded" if self.is_open else ""
        return f"between {self.low:g} and {self.high:.10g}{excluded}"

    def check(self, value: float, path: str) -> None:
        """Raise ConfigError for a value outside."""
        is_end = value in (self.low, self.high)
        # NaN is outside too: no comparison with it is true.
        if not self.low <= value <= self.high or (self.is_open and is_end):
            raise ConfigError.at(path, f"{value:g} is out of range; it must be {self}")


@frozen
class Pattern:
    """A mark of texts of one form.  The refusal does not repeat others: they may be secret."""

    pattern: str
    refusal: str
    form: str = ""

    def __str__(self) -> str:
        return self.form

    def check(self, value: str, path: str) -> None:
        """Raise ConfigError for a text of another form."""
        if not re.fullmatch(self.pattern, value):
            raise ConfigError.at(path, self.refusal)


def name_of(owner: str) -> Pattern:
    """A mark of names that become parts of Serve deployment names and of metric labels."""
    return Pattern(
        "[A-Za-z0-9][A-Za-z0-9_-]*",
        f"{owner} name may hold letters, digits, '_' and '-' only",
        "(letters, digits, _ and -)",
    )


@frozen
class Readable:
    """A mark of texts that `read` can read; it raises for others.  What it returns stands in a
    text's place where that is a text, too."""

    form: str
    read: Callable[[str], object]
    may_be_empty: bool = True

    def __str__(self) -> str:
        return f"({self.form})"

    def check(self, value: str, path: str) -> str | None:
        """Return the text to use, None for `value`; raises ConfigError for one of another form."""
        if not value and self.may_be_empty:
            return None
        try:
            found = self.read(value)
        except (ValueError, OSError, LookupError) as error:  # of zones, say
            raise ConfigError.at(path, f"{value!r} is no {self.form}: {error}") from error
        return found if isinstance(found, str) else None


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


def parse(kind: type[T], value: Any, path: str = "") -> T:
    """Build the dataclass `kind` from plain YAML data; every deviation is a ConfigError.

    path: where `value` stands in the file, for messages.
    """
    return typing.cast(T, _parse(kind, value, path))


def overlaid(base: T, value: Any, path: str) -> T:
    """Return the dataclass `base` with the keys that `value` has, as strictly as `parse`.

    Of sections, and of mappings to them, what `value` does not name stays as it is; every other
    value stands in place of the former."""
    return typing.cast(T, _parse_dataclass(type(base), value, path, base))


def mapping(value: Any, path: str) -> Mapping[str, Any]:
    """`value`, or an empty mapping for a key whose block was left empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError.at(path, f"{value!r} is not a mapping")
    for key in value:
        if not isinstance(key, str):
            reason = f"the key that YAML reads as {key!r} is no text; put it in quotes"
            raise ConfigError.at(path, reason)
    return value


def check_keys(section: Mapping[str, Any], known: Collection[str], path: str) -> None:
    """Raise ConfigError for a key that is not known, with the nearest one that is."""
    for key in section:
        check_known(key, known, _below(path, key), "unknown key", "known keys")


def check_known(name: str, known: Collection[str], path: str, reason: str, title: str) -> None:
    """Raise ConfigError for a name that is not known, with the nearest one that is."""
    if name not in known:
        raise ConfigError.at(path, f"{reason} ({nearest(name, known, title)})")


def is_text(kind: Any, keys: Sequence[str]) -> bool:
    """True if the dataclass `kind` has a text where these keys lead."""
    for key in keys:
        if dataclasses.is_dataclass(kind):
            section = typing.cast(type[Any], kind)
            kind = _hints(section).get(_names(section).get(key, ""))
        else:
            kind = (get_args(kind) or (None,))[-1]
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind) is str


def nearest(name: str, known: Iterable[str], title: str) -> str:
    """The known name that is most like `name` as a question, else all of them after `title`."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"{title}: {', '.join(names) or 'none'}"


def key_of(field: dataclasses.Field[Any]) -> str:
    """The key of a field in YAML: another than its name where Python keeps that for itself."""
    return str(field.metadata.get("key", field.name))


def _parse(kind: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _parse(arguments[0], value, path)
        for mark in arguments[1:]:
            found = mark.check(found, path) or found
        return found
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type[Any], kind), value, path)
    if kind is Any:
        return value
    if origin is Literal:
        return _parse_union((kind,), value, path)
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, value, path)
    if origin is not None and issubclass(origin, Mapping):
        keys, values = arguments
        return {
            _parse(keys, key, _below(path, key)): _parse(values, item, _below(path, key))
            for key, item in mapping(value, path).items()
        }
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError.at(path, f"{value!r} is not a list")
        return tuple(_parse(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # bool is an int to isinstance, but not to an operator
        raise ConfigError.at(path, f"{value!r} is not {_TYPE_NAMES.get(kind, kind)}")
    if kind is float and not math.isfinite(value):
        raise ConfigError.at(path, f"{value} is out of range; it must be finite")
    return value


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


Line = Annotated[str, Readable("line of text", _line_of)]
Folder = Annotated[str, Readable("folder", _folder_of)]


def _parse_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    """Of words, of another type, of None: what the schema uses has one type beside the others."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    rest = [kind for kind in kinds if kind is not types.NoneType and get_origin(kind) != Literal]
    if value in words or (value is None and types.NoneType in kinds):
        return value
    if not rest:
        known = ", ".join(filter(None, map(str, words)))
        raise ConfigError.at(path, f"{value!r} is none of: {known}")
    if isinstance(value, str) and words:
        others = _TYPE_NAMES.get(rest[0], "a mapping")
        raise ConfigError.at(path, f"{value!r} is not {', '.join(words)} or {others}")
    (other,) = rest
    return _parse(other, value, path)


def _hints(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _names(kind: type[Any]) -> dict[str, str]:
    """Return the fields' names by their keys."""
    return {key_of(field): field.name for field in dataclasses.fields(kind)}


def _is_of_sections(hint: Any) -> bool:
    arguments = get_args(hint)
    return len(arguments) == 2 and dataclasses.is_dataclass(arguments[1])


def _parse_dataclass(kind: type[Any], value: Any, path: str, base: Any = None) -> Any:
    """base: has what `value` does not name; None = the defaults of `kind`."""
    hints, names = _hints(kind), _names(kind)
    found: dict[str, Any] = {}
    for key, item in _section(kind, value, path).items():
        name, below = names[key], _below(path, key)
        former = getattr(base, name, None)
        if dataclasses.is_dataclass(former):
            found[name] = overlaid(former, item, below)
            continue
        found[name] = _parse(hints[name], item, below)
        if isinstance(former, Mapping) and _is_of_sections(hints[name]):
            found[name] = {**former, **found[name]}
    with ConfigError.below(path):  # its __post_init__ does not know its path
        return kind(**found) if base is None else dataclasses.replace(base, **found)


def _section(kind: type[Any], value: Any, path: str) -> Mapping[str, Any]:
    """Return a section whose keys the dataclass `kind` has.

    Raises ConfigError for others, and for keys and values (`key=value`) that are in its REMOVED."""
    removed: Mapping[str, str] = getattr(kind, "REMOVED", {})
    section = mapping(value, path)
    for key, item in section.items():
        values = item if isinstance(item, list) else [item]
        said = [(f"{key}={each}", repr(each)) for each in values]
        for gone, named in ((key, "this key"), *said):
            if gone in removed:
                raise ConfigError.at(_below(path, key), f"{named} is gone; {removed[gone]}")
    check_keys(section, _names(kind), path)
    return section


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
