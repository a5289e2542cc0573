"""What is said of the fields of a body: in errors, where a client's values are shortened; in the
document of the API; and of those without effect in a header and in the log.

What others serve and this server does not stands in unserved.yaml.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.errors import RequestError, joined
from cluster.records import frozen

log = logging.getLogger(__name__)


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


# An object in a body or an answer, as `json` has it.
JsonObject = dict[str, Any]

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


# What a header may carry of a client's own names.
_MAX_WARNED = 16
_NOT_PRINTED = re.compile(r"[^A-Za-z0-9_.\[\]\-]")
# So many names have a line of the log: clients may invent any number of them.
_MAX_LOGGED = 1000


def told_names(names: Iterable[str], logged: set[str]) -> tuple[str, ...]:
    """Each name once; those that the log does not have yet are written there.  logged: by name."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in logged and len(logged) < _MAX_LOGGED:
            logged.add(name)
            log.info("requests have a field without effect: %s", _NOT_PRINTED.sub("?", name))
    return found


def warning_header(ignored: Sequence[str]) -> Mapping[str, str]:
    """The header that says which fields of the request had no effect; none if all had one."""
    if not ignored:
        return {}
    names = [_NOT_PRINTED.sub("?", name) for name in ignored[:_MAX_WARNED]]
    more = len(ignored) - len(names)
    listed = ", ".join(names) + (f" and {more} more" if more else "")
    return {"Warning": f'299 drafthouse "fields without effect: {listed}"'}


Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
TEXT_OR_OBJECTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]}

_NAMES = {
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "object": "an object",
    "array": "a list",
    "boolean": "true or false",
}
_RANGES = {"minimum": "from {}", "exclusiveMinimum": "above {},", "maximum": "to {}"}
# The bounds of what has a length, and what it has.
_LENGTHS = {
    "string": ("minLength", "maxLength", " characters"),
    "array": ("minItems", "maxItems", ""),
    "object": ("minProperties", "maxProperties", " fields"),
}
_BOUNDS = {*_RANGES, *(key for low, high, _ in _LENGTHS.values() for key in (low, high))}
# By pydantic's name of what is wrong.
_SENTENCES = {
    "missing": "missing; send {note}",
    "string_too_long": "{length} characters, longer than {most}; shorten it",
    "string_too_short": "empty; send at least one character",
    "too_long": "{length} items; send at most {most}",
    "too_short": "empty; send at least one",
    **dict.fromkeys(
        ("greater_than", "greater_than_equal", "less_than_equal", "finite_number"),
        "{value} is out of range; send {wanted}",
    ),
}
_OTHERWISE = "{value}; send {wanted}"


class Status(enum.StrEnum):
    SUPPORTED = "supported"
    IGNORED = "ignored"  # accepted; a header of the answer names it
    UNNEEDED = "ignored unless strict"  # changes nothing where it is ignored
    REFUSED = "refused"  # a 400 that names it, whatever the compatibility


@frozen
class Rule:
    """One field, by its name in the body.

    note: what it does, why it has no effect, or the remedy.  schema: JSON Schema of a supported
    value; a string as bound is a path in `Limits`.  below: what its value, or each
    element of it, is.  harmless: values of a field that is not supported which ask for nothing.
    """

    name: str
    note: str
    schema: Schema
    is_required: bool = True
    status: Status = Status.SUPPORTED
    harmless: tuple[Any, ...] = (None,)
    below: type[Any] | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """True if a field that is not supported may have `value` without a word."""
        # `1 == True` in Python, so types are compared as well.
        return any(type(value) is type(option) and value == option for option in self.harmless)

    def has_no_effect(self, *, is_lenient: bool) -> bool:
        """True if it is ignored, and not refused, where it asks for something."""
        return self.status is Status.IGNORED or (is_lenient and self.status is Status.UNNEEDED)


_TEXT = Path(__file__).with_name("unserved.yaml").read_text("utf-8")
_FIELDS, KINDS_ELSEWHERE, UNSERVED = yaml.safe_load_all(_TEXT)


def unserved(body: type) -> Iterator[Rule]:
    """The fields that this body has elsewhere, without those of its bases."""
    for name, (status, note, *harmless) in _FIELDS.get(body.__name__, {}).items():
        yield Rule(name, note, {}, False, Status[status.upper()], (None, *harmless))


def reason_of(path: str) -> str:
    """Return why a path is not served, "" for one that no server has."""
    for version in ("/v1", "/v2"):
        path = path.removeprefix(version)
    for beginning in sorted(UNSERVED, key=len, reverse=True):
        if path == beginning or path.startswith(f"{beginning}/"):
            what, remedy = UNSERVED[beginning]
            return f"{what}: not served here; {remedy}"
    return ""


def plain(schema: Schema) -> Schema:
    """A field's schema as pydantic has it, without null and without what allows no value."""
    options = [plain(one) for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    found: JsonObject = (
        dict(options[0]) if len(options) == 1 else {"anyOf": options} if options else {}
    )
    for key, value in schema.items():
        if key in ("items", "additionalProperties") and isinstance(value, Mapping):
            found[key] = plain(value)
        elif key == "$ref":
            found["type"] = "object"
        elif key in ("type", "enum", "const") or key in _BOUNDS:
            found[key] = value
    return found


def resolved(schema: Schema, limits: object) -> JsonObject:
    """`schema` with the names of limits replaced by their values."""

    def known(one: JsonObject) -> JsonObject:
        for key in _BOUNDS & one.keys():
            if isinstance(one[key], str):
                one[key] = attrgetter(one[key])(limits)
        return one

    return dict(json.loads(json.dumps(schema), object_hook=known))


def described(schema: Schema) -> str:
    """The values that a schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(map(described, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        words = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(word)}`" for word in words)
    kind = schema.get("type", "")
    said = [_NAMES.get(kind, "a value")]
    said += [word.format(_bound(schema[key])) for key, word in _RANGES.items() if key in schema]
    least, most, unit = _LENGTHS.get(kind, ("", "", ""))
    if least in schema and most in schema:
        said.append(f"of {_bound(schema[least])} to {_bound(schema[most])}{unit}")
    elif least in schema or most in schema:
        bound = _bound(schema.get(most, schema.get(least)))
        said.append(f"of at {'most' if most in schema else 'least'} {bound}{unit}")
    text = " ".join(said)
    return f"{text}, each {described(schema['items'])}" if "items" in schema else text


def _bound(value: Any) -> str:
    if isinstance(value, str):
        return f"`{value.rpartition('.')[2]}`"
    return f"{int(value) if value == int(value) else value:,}".replace(",", " ")


def refusal(body: Any, error: ValidationError, limits: object) -> RequestError:
    """What a client is told: of what is wrong, else of what is missing."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] == "missing")
    path, schema, note = _place(body, first["loc"])
    about, value = first.get("ctx", {}), first["input"]
    if first["type"] == "placed":
        placed: RequestError = about["error"]
        return type(placed).at(joined(path, placed.param or ""), placed.reason)
    schema = resolved(schema, limits)
    # A text of the client's own is shown only where it is no text that is wanted.
    is_shown = all(
        "enum" in one or "const" in one or one.get("type") not in ("string", "array", "object")
        for one in schema.get("anyOf", [schema])
    )
    reason = _SENTENCES.get(first["type"], _OTHERWISE).format(
        value=shown(value) if is_shown else json_kind(value),
        wanted=described(schema).replace("`", ""),
        note=note,
        length=len(value) if isinstance(value, str | list | dict) else 0,
        most=about.get("max_length"),
    )
    return RequestError.at(path, reason)


def _place(body: Any, place: tuple[int | str, ...]) -> tuple[str, Schema, str]:
    """The path of what is wrong in a body, its schema, and what its field is for."""
    if place[-1] == "[key]":  # an object whose keys are not the field's own
        place = place[:-2]
    name, *below = place
    rule = body.rules()[name]
    path, schema = rule.name, rule.schema
    for part in below:
        options = schema.get("anyOf", [schema])
        if len(options) > 1 and "items" not in options[-1]:
            break  # `part` says which of them was tried
        if isinstance(part, int):
            schema = options[-1].get("items", {})
            if schema.get("type") != "object":
                break  # a list of values is named as one
            path += f"[{part}]"
        else:
            path = joined(path, part[:MAX_SHOWN_KEY_LEN])
            schema = schema.get("additionalProperties", {})
    return path, schema, rule.note
