"""Any number of varied JSON schemas: the families take turns, and a seed fills them in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

_THINGS = ("book", "film", "city", "planet", "recipe", "animal", "train", "song", "plant", "lake")
_WORDS = (
    "name", "title", "kind", "colour", "origin", "owner", "status", "label", "region", "notes",
    "weight", "height", "price", "count", "year", "score", "level", "depth", "width", "rank",
)  # fmt: skip
_VALUES = ("small", "medium", "large", "red", "green", "blue", "north", "south", "old", "new")
_PATTERNS = (
    r"^[A-Z]{2}-[0-9]{4}$", r"^[a-z]+@[a-z]+\.(com|org)$", r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    r"^#[0-9a-f]{6}$", r"^\+[1-9][0-9]{6,11}$",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """One question, and the schema of its answer."""

    family: str
    question: str
    schema: Schema


def tasks(count: int, seed: int) -> list[Task]:
    """Return the tasks of a seed; a longer list begins with the shorter one."""
    generator = random.Random(seed)
    families = list(FAMILIES.items())
    found = []
    for index in range(count):
        family, make = families[index % len(families)]
        thing = generator.choice(_THINGS)
        question = f"Describe a {thing} of your choice as JSON. Keep every text short."
        found.append(Task(family, question, make(generator)))
    return found


def _object(properties: Schema, **more: Any) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False, **more,
    }  # fmt: skip


def _names(generator: random.Random, count: int) -> list[str]:
    return generator.sample(_WORDS, count)


def _text() -> Schema:
    return {"type": "string", "maxLength": 24}


def _number(generator: random.Random) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": generator.choice((9, 100, 5000))}


def _scalar(generator: random.Random) -> Schema:
    return generator.choice((_text(), _number(generator), {"type": "boolean"}, _choice(generator)))


def _choice(generator: random.Random) -> Schema:
    return {"enum": generator.sample(_VALUES, generator.randint(2, 6))}


def _flat(generator: random.Random) -> Schema:
    return _object({name: _scalar(generator) for name in _names(generator, 5)})


def _nested(generator: random.Random) -> Schema:
    outer, inner, deep = _names(generator, 3)
    leaves = {name: _scalar(generator) for name in _names(generator, 3)}
    return _object(
        {outer: _text(), inner: _object({deep: _object(leaves), "unit": _choice(generator)})}
    )


def _enums(generator: random.Random) -> Schema:
    return _object({name: _choice(generator) for name in _names(generator, 4)})


def _patterns(generator: random.Random) -> Schema:
    names = _names(generator, 3)
    return _object(
        {name: {"type": "string", "pattern": generator.choice(_PATTERNS)} for name in names}
    )


def _recursion(generator: random.Random) -> Schema:
    name, value = _names(generator, 2)
    node = _object({name: _choice(generator), value: _number(generator)})
    node["properties"]["children"] = {
        "type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2,
    }  # fmt: skip
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _references(generator: random.Random) -> Schema:
    first, second, third = _names(generator, 3)
    return _object(
        {
            first: {"$ref": "#/$defs/place"},
            second: {"$ref": "#/$defs/place"},
            third: {"type": "array", "items": {"$ref": "#/$defs/size"}, "minItems": 1,
                    "maxItems": 3},
        },
        **{
            "$defs": {
                "place": _object({"x": _number(generator), "y": _number(generator)}),
                "size": _choice(generator),
            }
        },
    )  # fmt: skip


def _unions(generator: random.Random) -> Schema:
    one, other = _names(generator, 2)
    forms = [
        _object({"form": {"const": "short"}, one: _text()}),
        _object({"form": {"const": "long"}, one: _text(), other: _number(generator)}),
        {"type": "null"},
    ]
    value = {"anyOf": [{"type": "boolean"}, _number(generator), _choice(generator)]}
    return _object({"answer": {"anyOf": forms}, "value": value})


def _arrays(generator: random.Random) -> Schema:
    item = _object({name: _scalar(generator) for name in _names(generator, 2)})
    return _object({"items": {"type": "array", "items": item, "minItems": 1, "maxItems": 3}})


def _optional(generator: random.Random) -> Schema:
    names = _names(generator, 5)
    schema = _object({name: _scalar(generator) for name in names})
    return {**schema, "required": names[:2]}


FAMILIES: dict[str, Callable[[random.Random], Schema]] = {
    "flat": _flat, "nested": _nested, "enums": _enums, "patterns": _patterns,
    "recursion": _recursion, "references": _references, "unions": _unions, "arrays": _arrays,
    "optional": _optional,
}  # fmt: skip
