"""JSON schemas as generators write them, made ready for a library of grammars.

What restricts no value is left out: annotations, formats that the library does not know, branches
that nothing fits.  A keyword that restricts and is not served is refused with its place.  A schema
that is not strict (`lenient`) is held without it, as OpenAI's API does.  Raises ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from cluster.records import frozen

# As `json.dumps` writes: models know this layout well, and all between the values is forced.
# oneOf is served as anyOf: a grammar cannot tell whether a value fits a second branch as well.
_LAYOUT: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
# The library's own options stand in a schema.
_OPTIONS, _LENIENT = "x-guidance", {"lenient": True}
# The library holds texts to these; the standard lets all others be annotations.
_FORMATS = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
]
# Their values are no schemas, whatever they look like.
_LITERAL = ["const", "default", "enum", "example", "examples", "type"]
_BY_NAME = ["$defs", "definitions", "patternProperties", "properties"]
# They restrict nothing, or nothing without a keyword that is not served.
_IDLE = [
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$schema",
    "$vocabulary",
    "else",
    "maxContains",
    "minContains",
    "then",
]
# Keywords that restrict and that the library does not know, and their values that restrict nothing.
_UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "not": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), ({}, True)),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef", "contains", "if"), ()),
}
# Nothing fits a schema where nothing is left of them.
_BRANCHES = ("anyOf", "oneOf", "not")
# Parts of patterns that are not regular, in the words of the library's refusals.
_NOT_REGULAR = ("look-around", "lookaround", "backreference")


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, to be held without what is not served of it."""
    return {**schema, _OPTIONS: _LENIENT}


def servable(schema: Any, path: str = "") -> dict[str, Any]:
    """The schema for the library, with the layout of its texts.  path: where it stands."""
    is_lenient = isinstance(schema, dict) and schema.get(_OPTIONS) == _LENIENT
    found = {} if schema is True else _Reader(is_lenient).schema(schema, path)
    if not isinstance(found, dict):
        raise ValueError(f"{path or 'the schema'} is no schema that a value fits")
    return {**found, _OPTIONS: {**_LAYOUT, "lenient": is_lenient}}


@frozen
class _Reader:
    is_lenient: bool

    def schema(self, value: Any, path: str) -> Any:
        """A schema, or a list of them; False where nothing fits.  All else stays as it is."""
        if isinstance(value, list):
            return [self.schema(each, f"{path}[{index}]") for index, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        found: dict[str, Any] = {}
        for key, each in value.items():
            if key in _LITERAL:
                found[key] = each
                continue
            kept = self._kept(key, each, f"{path}.{key}".lstrip("."))
            if kept is False and key in _BRANCHES:
                return False
            if kept is not None:
                found[key] = kept
        # OpenAPI 3.0 has no type of null.  Definitions stay where references look for them.
        if found.pop("nullable", False) is True and not found.keys() & {"$defs", "definitions"}:
            return {"anyOf": [found, {"type": "null"}]}
        return found

    def _kept(self, key: str, value: Any, place: str) -> Any:
        """What the library is given of a keyword; None = nothing."""
        if key in _IDLE or key.startswith("x-"):
            return None
        if key in _BY_NAME and isinstance(value, dict):
            return {
                name: self.schema(each, f"{place}.{name}")
                for name, each in value.items()
                if key != "patternProperties" or self._is_served(name, place)
            }
        inner = self.schema(value, place)
        if key == "not" and inner in ({}, True):
            return False
        if key in _UNSERVED:
            if not self.is_lenient and inner not in _UNSERVED[key]:
                raise ValueError(f"{place} is not served")
            return None
        if key in _BRANCHES and isinstance(inner, list):
            return [branch for branch in inner if branch is not False] or False
        if key == "format" and inner not in _FORMATS:
            return None
        if key == "pattern" and isinstance(inner, str) and not self._is_served(inner, place):
            return None
        # JSON has one kind of number: a length may come as 1.0.
        return int(inner) if isinstance(inner, float) and inner.is_integer() else inner

    def _is_served(self, pattern: str, place: str) -> bool:
        """False for a pattern that is left out; raises ValueError for what is none."""
        # In a group, because the library drops a backslash at the end.
        text = {"type": "string", "pattern": f"({pattern})"}
        reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        if reason and not (self.is_lenient and any(part in reason for part in _NOT_REGULAR)):
            raise ValueError(f"{place} is no pattern that is served: {reason}")
        return not reason
