"""Plain YAML data to dataclasses, strictly: every deviation is a ConfigError with its path."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from cluster.errors import ConfigError

T = TypeVar("T")


def parse(kind: type[T], value: Any, path: str = "") -> T:
    """Build the dataclass `kind` from plain YAML data; every deviation is a ConfigError.

    path: where `value` stands in the file, for messages.
    """
    return typing.cast(T, _parse(kind, value, path))


def _parse(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type[Any], kind), value, path)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, value, path)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(str(choice) for choice in arguments)
            raise ConfigError(f"{path}: {value!r} is none of: {choices}", param=path)
        return value
    if origin is not None and issubclass(origin, Mapping):
        if value is None:  # a key whose block was left empty
            return {}
        if not isinstance(value, Mapping):
            raise _mismatch("a mapping", value, path)
        return {
            str(key): _parse(arguments[1], item, f"{path}.{key}") for key, item in value.items()
        }
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _mismatch("a list", value, path)
        return tuple(_parse(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    return _parse_scalar(kind, value, path)


def _parse_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:  # bool is an int to isinstance, but not to an operator
        names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
        raise _mismatch(names.get(kind, str(kind)), value, path)
    return value


def _parse_union(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    words = [word for kind in arguments if get_origin(kind) is Literal for word in get_args(kind)]
    if isinstance(value, str) and words:
        if value not in words:
            raise _mismatch(f"{', '.join(words)} or a mapping", value, path)
        return value
    kinds = [kind for kind in arguments if kind is not type(None) and get_origin(kind) != Literal]
    if len(kinds) != 1:
        raise TypeError(f"{path}: the schema may only use `X | None` and `Literal | X` unions")
    return _parse(kinds[0], value, path)


def _parse_dataclass(kind: type[Any], value: Any, path: str) -> Any:
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise _mismatch("a mapping", value, path)
    hints = typing.get_type_hints(kind)
    # A key that Python keeps for itself is a field's `key`.
    names = {f.metadata.get("key", f.name): f.name for f in dataclasses.fields(kind)}
    known = list(names)
    removed: Mapping[str, str] = getattr(kind, "REMOVED", {})
    for key in value:
        if key in removed:
            place = f"{path}.{key}" if path else str(key)
            raise ConfigError(f"{place}: this key is gone; {removed[key]}", param=place)
        if key not in known:
            raise unknown_key(str(key), known, f"{path}.{key}" if path else str(key))
    prefix = f"{path}." if path else ""
    return kind(
        **{
            names[key]: _parse(hints[names[key]], item, f"{prefix}{key}")
            for key, item in value.items()
        }
    )


def unknown_key(key: str, known: Sequence[str], path: str) -> ConfigError:
    """The error for a key that is not in the schema, with the nearest one that is."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return ConfigError(f"{path}: unknown key ({hint})", param=path)


def _mismatch(expected: str, value: Any, path: str) -> ConfigError:
    return ConfigError(f"{path}: {value!r} is not {expected}", param=path)
