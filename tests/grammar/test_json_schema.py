"""JSON schemas as generators write them: what each keyword gives, and what is refused and where."""

import json
from typing import Any

import pytest

from cluster.errors import RequestError
from cluster.grammar.json_schema import lenient
from cluster.requests.fields import GrammarSpec
from tests.support.grammar.specs import eos, ids_of, open_text

TEXT = {"type": "string"}
# Of the drafts of JSON Schema, of OpenAPI's registry, and some that nobody has registered.
ANNOTATIONS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex", "int8", "int32", "int64", "uint64"),
    *("float", "double", "decimal", "byte", "binary", "base64url", "password", "char", "html"),
    *("media-range", "commonmark", "sf-string", "color", "phone", "style", "unknown-to-all"),
)
# With a value that has the format and one that has it not.
HELD = {
    "date": ("2024-02-29", "yesterday"),
    "date-time": ("2024-02-29T12:00:00Z", "2024-02-29"),
    "time": ("12:00:00Z", "noon"),
    "duration": ("P1D", "a day"),
    "email": ("a@b.example", "a.b.example"),
    "hostname": ("a.example", "-"),
    "ipv4": ("10.0.0.1", "10.0.0.256"),
    "ipv6": ("::1", "10.0.0.1"),
    "uri": ("https://a.example/b?c#d", "a b"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
}


def wrapped(schema: Any) -> dict[str, Any]:
    """As most schemas stand: in an object's property."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def fits(schema: Any, value: object) -> bool:
    """Whether a text of the schema may be that value, as `json.dumps` writes it."""
    text = open_text(GrammarSpec("json_schema", json.dumps(schema)))
    tokens = ids_of(json.dumps({"a": value}, ensure_ascii=False))
    return all(map(text.push, tokens)) and text.push(eos()[0])


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_a_format_that_the_library_does_not_know_is_an_annotation(name: str):
    schema = wrapped({"type": "string", "format": name})
    assert fits(schema, "what ever")
    assert not fits(schema, 5)
    assert fits(wrapped({"type": "integer", "format": name}), 5)


@pytest.mark.parametrize("name", HELD)
def test_a_format_that_the_library_knows_is_held(name: str):
    right, wrong = HELD[name]
    schema = wrapped({"type": "string", "format": name})
    assert fits(schema, right)
    assert not fits(schema, wrong)


NEVER: list[Any] = [{"not": {}}, {"not": True}, False, {"anyOf": [{"not": {}}, False]}]
# A schema, a value that fits, and one that does not (None: all fit).
SERVED: dict[str, tuple[Any, Any, Any]] = {
    "annotations": (
        {
            **TEXT,
            "$schema": "https://spec.openapis.org/oas/3.1/dialect/base",
            "title": "t",
            "$id": "https://a.example/b",
            "$comment": "c",
            "description": "d",
            "default": None,
            "examples": ["e"],
            "example": "e",
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "contentMediaType": "a/b",
            "contentEncoding": "base64",
            "contentSchema": {},
            "xml": {"name": "x"},
            "externalDocs": {"url": "u"},
            "x-order": {"contains": 1},
            "$vocabulary": {"v": True},
            "$dynamicAnchor": "n",
        },
        "b",
        1,
    ),
    "nulls for nothing": ({**TEXT, "pattern": None, "format": None, "minLength": None}, "b", 1),
    "a whole float": ({**TEXT, "minLength": 2.0}, "bc", "b"),
    "nullable": ({**TEXT, "nullable": True}, None, 1),
    "nullable, of an object": ({**wrapped(TEXT), "nullable": True}, None, 1),
    "nullable enum": ({**TEXT, "nullable": True, "enum": ["b", "c"]}, None, "d"),
    "not nullable": ({**TEXT, "nullable": False}, "b", None),
    "const": ({"const": {"b": [1, None]}}, {"b": [1, None]}, {"b": [1]}),
    "const null": ({"const": None}, None, 0),
    "enum with null": ({"enum": ["b", None]}, None, "c"),
    "type with null": ({"type": ["string", "null"]}, None, 1),
    "not nothing": ({**TEXT, "not": False}, "b", 1),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1, "b"),
    "oneOf with a discriminator": (
        {
            "oneOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/C"}],
            "discriminator": {"propertyName": "k", "mapping": {"b": "#/$defs/B"}},
        },
        {"k": "c"},
        {"k": "d"},
    ),
    "allOf": ({"allOf": [TEXT, {"minLength": 2}]}, "bc", "b"),
    "additionalProperties": (
        {"type": "object", "additionalProperties": TEXT},
        {"b": "c"},
        {"b": 1},
    ),
    "no additionalProperties": (
        {"type": "object", "properties": {"b": TEXT}, "additionalProperties": {"not": {}}},
        {"b": "c"},
        {"d": "c"},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^b": TEXT}, "additionalProperties": False},
        {"bc": "d"},
        {"c": "d"},
    ),
    "propertyNames of text": ({"type": "object", "propertyNames": TEXT}, {"b": 1}, 1),
    "minProperties": (
        {"type": "object", "additionalProperties": TEXT, "minProperties": 1},
        {"b": "c"},
        {},
    ),
    "not unique": ({"type": "array", "uniqueItems": False}, [1, 1], 1),
    "all evaluated": ({"type": "object", "unevaluatedProperties": True}, {"b": 1}, 1),
    "prefixItems": ({"type": "array", "prefixItems": [TEXT], "items": False}, ["b"], ["b", 1]),
    "items of draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "items": [TEXT], "type": "array"},
        ["b"],
        [1],
    ),
    "definitions": ({"$ref": "#/definitions/D"}, "2024-02-29", "b"),
    "components": ({"$ref": "#/components/schemas/E"}, "b", 1),
    r"pattern \d": ({**TEXT, "pattern": r"^\d{2}$"}, "12", "1"),
    "pattern /": ({**TEXT, "pattern": r"^b\/c/$"}, "b/c/", "b"),
    r"pattern \p": ({**TEXT, "pattern": r"^\p{L}+$"}, "bé", "1"),
    "pattern group": ({**TEXT, "pattern": r"^(?<y>\d)[\w\-]$"}, "1-", "1"),
    "pattern inside": ({**TEXT, "pattern": "b"}, "abc", "ac"),
}
AROUND = {
    "$defs": {
        "B": {"type": "object", "properties": {"k": {"const": "b"}}},
        "C": {"type": "object", "properties": {"k": {"const": "c"}}},
    },
    "definitions": {"D": {"type": "string", "format": "date"}},
    "components": {"schemas": {"E": {"type": "string", "format": "iri"}}},
}


@pytest.mark.parametrize(("schema", "right", "wrong"), SERVED.values(), ids=SERVED)
def test_what_generators_write_is_served(schema: Any, right: object, wrong: object):
    whole = {**wrapped(schema), **AROUND}
    assert fits(whole, right)
    assert not fits(whole, wrong)


@pytest.mark.parametrize("never", NEVER, ids=json.dumps)
@pytest.mark.parametrize("keyword", ["anyOf", "oneOf"])
def test_a_branch_that_nothing_fits_is_left_out(keyword: str, never: Any):
    schema = wrapped({keyword: [never, TEXT, {"type": "null"}]})
    assert fits(schema, "b")
    assert fits(schema, None)
    assert not fits(schema, 1)
    optional = {"type": "object", "properties": {"a": TEXT, "b": never}}
    assert fits(optional, "b")


def reason(schema: Any) -> str:
    with pytest.raises(RequestError, match="the grammar cannot be used") as caught:
        open_text(GrammarSpec("json_schema", json.dumps(schema)))
    return caught.value.message


@pytest.mark.parametrize("never", NEVER, ids=json.dumps)
def test_where_no_branch_is_left_the_schema_is_refused(never: Any):
    assert "'a' is unsatisfiable" in reason(wrapped({"anyOf": [never, never]}))
    assert "no schema that a value fits" in reason({"oneOf": [never]})
    assert "no schema that a value fits" in reason(never)


OF_OBJECT = {"type": "object", "properties": {"b": TEXT, "c": TEXT}}
UNSERVED: dict[str, dict[str, Any]] = {
    "not": {**TEXT, "not": {"const": "b"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^b"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": TEXT, "minContains": 2},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {**OF_OBJECT, "unevaluatedProperties": False},
    "dependencies": {**OF_OBJECT, "dependencies": {"b": ["c"]}},
    "dependentRequired": {**OF_OBJECT, "dependentRequired": {"b": ["c"]}},
    "dependentSchemas": {**OF_OBJECT, "dependentSchemas": {"b": {"required": ["c"]}}},
    "if": {**OF_OBJECT, "if": {"required": ["b"]}, "then": {"required": ["c"]}, "else": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "pattern": {**TEXT, "pattern": "^(?!b).*$"},
}


@pytest.mark.parametrize(("keyword", "schema"), UNSERVED.items(), ids=UNSERVED)
def test_what_restricts_and_is_not_served_is_refused_with_its_place(
    keyword: str, schema: dict[str, Any]
):
    deep = {"anyOf": [{"type": "null"}, {"type": "array", "items": schema}]}
    assert f"used: properties.a.anyOf[1].items.{keyword} is " in reason(wrapped(deep))


@pytest.mark.parametrize("schema", UNSERVED.values(), ids=UNSERVED)
def test_a_schema_that_is_not_strict_is_held_without_it(schema: dict[str, Any]):
    value: Any = {"array": [1], "object": {"b": "x"}}.get(schema.get("type", ""), "x")
    assert fits(lenient(wrapped(schema)), value)
    if "type" in schema:
        assert not fits(lenient(wrapped(schema)), 1)


@pytest.mark.parametrize("pattern", ["\\", "b\\", "(", "[b", "b{2,1}", "*", r"\p{Nowhere}", "(?<b"])
@pytest.mark.parametrize("kind", [TEXT, {"type": "integer"}, {}], ids=["text", "number", "any"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_what_is_no_regular_expression_is_never_ignored(
    pattern: str, kind: dict[str, Any], *, is_strict: bool
):
    for schema, place in (
        (wrapped({**kind, "pattern": pattern}), "properties.a.pattern"),
        ({"type": "object", "patternProperties": {pattern: TEXT}}, "patternProperties"),
    ):
        assert f"{place} is no pattern" in reason(schema if is_strict else lenient(schema))


def test_a_tag_names_the_place_as_well():
    tag = {
        "type": "tag",
        "begin": "<a>",
        "end": "</a>",
        "content": {"type": "json_schema", "json_schema": wrapped({**TEXT, "pattern": "\\"})},
    }
    source = json.dumps({"type": "structural_tag", "format": tag})
    with pytest.raises(RequestError, match=r"format\.content\.json_schema\.properties\.a\.pattern"):
        open_text(GrammarSpec("structural_tag", source))
