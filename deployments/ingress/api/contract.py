"""What each field of each request body means here: supported, ignored or refused, by name.

The parsers, docs/api.md and /openapi.json all read these records; `table` holds them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from cluster.errors import RequestError
from deployments.ingress.fields import MAX_SHOWN_KEY_LEN, shown, unknown

Schema = Mapping[str, Any]
Compatibility = Literal["strict", "lenient"]

# What a header may carry of a client's own names.
_MAX_WARNED = 16
_NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.\-]")


class Status(enum.StrEnum):
    SUPPORTED = "supported"
    IGNORED = "ignored"  # accepted; a header of the answer names it
    REFUSED = "refused"  # a 400 that names it, whatever the compatibility


@dataclass(frozen=True, slots=True)
class Rule:
    """One field.  name: its path in the body; `[]` stands for every element of a list.

    note: what it does, why it has no effect, or the remedy.  schema: JSON Schema of a supported
    value; a string as bound names an attribute of `Limits`.
    harmless: values of a field that is not supported which ask for nothing, beside null.
    """

    name: str
    status: Status
    note: str
    schema: Schema | None = None
    harmless: tuple[Any, ...] = ()
    is_required: bool = False

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether a field that is not supported may have `value` without a word."""
        # `1 == True` in Python, so types are compared as well.
        return value is None or any(
            type(value) is type(option) and value == option for option in self.harmless
        )


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One POST endpoint and the rules of its body."""

    path: str
    summary: str
    rules: tuple[Rule, ...]

    @cache  # noqa: B019  # the endpoints are few, and live as long as the process
    def below(self, prefix: str) -> Mapping[str, Rule]:
        """The rules of the fields directly below `prefix` ("" = of the body itself), by name."""
        start = f"{prefix}." if prefix else ""
        found = (rule for rule in self.rules if rule.name.startswith(start))
        names = {rule.name.removeprefix(start): rule for rule in found}
        return {name: rule for name, rule in names.items() if "." not in name and "[" not in name}

    def open(self, values: Mapping[str, Any], compatibility: Compatibility) -> Opened:
        """Check the names in a body; raises RequestError for the first that is not accepted."""
        opened = Opened(self, compatibility)
        opened.check(values, "", "")
        return opened


@dataclass(frozen=True, slots=True)
class Opened:
    """A body whose names are checked.  ignored: those of fields without effect."""

    endpoint: Endpoint
    compatibility: Compatibility
    ignored: list[str] = field(default_factory=list)

    def check(self, values: Mapping[str, Any], prefix: str, path: str) -> None:
        """Check one object of the body, and those in it.

        prefix: what the rules call it.  path: where it is in this body.
        """
        rules = self.endpoint.below(prefix)
        for key, value in values.items():
            name = (f"{path}." if path else "") + key[:MAX_SHOWN_KEY_LEN]
            rule = rules.get(key)
            if rule is None:
                # Clients send an answer back with its empty fields (`annotations: []`).
                if "[" not in prefix or value not in (None, [], {}):
                    self._unknown(key, name, rules)
            elif rule.status is Status.REFUSED:
                if not rule.asks_for_nothing(value):
                    raise RequestError.at(name, f"{shown(value)} is not supported; {rule.note}")
            elif rule.status is Status.IGNORED:
                if not rule.asks_for_nothing(value):
                    self.ignored.append(name)
            else:
                self._descend(value, rule.name, name)

    def _descend(self, value: Any, prefix: str, path: str) -> None:
        if isinstance(value, dict) and self.endpoint.below(prefix):
            self.check(value, prefix, path)
        if isinstance(value, list) and self.endpoint.below(f"{prefix}[]"):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    self.check(item, f"{prefix}[]", f"{path}[{index}]")

    def _unknown(self, key: str, name: str, rules: Mapping[str, Rule]) -> None:
        if self.compatibility == "lenient":
            self.ignored.append(name)
            return
        raise unknown(name, key, rules)


def warning_header(ignored: Sequence[str]) -> Mapping[str, str]:
    """The header that says which fields of the request had no effect; none if all had one."""
    if not ignored:
        return {}
    names = [_NOT_IN_HEADERS.sub("?", name) for name in ignored[:_MAX_WARNED]]
    more = len(ignored) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return {"Warning": f'299 drafthouse "fields without effect: {listed}"'}


def supported(name: str, schema: Schema, note: str, *, is_required: bool = False) -> Rule:
    return Rule(name, Status.SUPPORTED, note, schema, is_required=is_required)


def ignored(name: str, why: str, *harmless: Any) -> Rule:
    return Rule(name, Status.IGNORED, why, harmless=harmless)


def refused(name: str, remedy: str, *harmless: Any) -> Rule:
    return Rule(name, Status.REFUSED, remedy, harmless=harmless)


# Schemas


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def integer(low: int | str, high: int | str) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def text(max_len: int | None = None, min_len: int | None = None) -> Schema:
    bounds = {"minLength": min_len, "maxLength": max_len}
    return {"type": "string"} | {key: value for key, value in bounds.items() if value is not None}


def array(items: Schema, max_items: int | str | None = None, min_items: int = 0) -> Schema:
    schema: dict[str, Any] = {"type": "array", "items": items}
    if max_items is not None:
        schema["maxItems"] = max_items
    return schema | ({"minItems": min_items} if min_items else {})


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def resolved(schema: Schema, limits: object) -> dict[str, Any]:
    """`schema` with the names of limits replaced by their values."""
    return dict(_resolved(schema, limits))


_BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")


def _resolved(schema: Schema, limits: object) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in _BOUNDS and isinstance(value, str):
            yield key, getattr(limits, value)
        elif key == "anyOf":
            yield key, [resolved(one, limits) for one in value]
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            yield key, resolved(value, limits)
        elif key == "properties":
            yield key, {name: resolved(one, limits) for name, one in value.items()}
        else:
            yield key, value
