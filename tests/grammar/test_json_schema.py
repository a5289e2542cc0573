"""JSON schemas as generators write them: what each keyword gives, and what is refused and where.
The cases are those of json_schema.yaml."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.grammar.json_schema import lenient
from cluster.requests.fields import GrammarSpec
from tests.support.errors import request_error
from tests.support.grammar.specs import eos, ids_of, open_text

TEXT = {"type": "string"}
# Of the drafts of JSON Schema, of OpenAPI's registry, and some that nobody has registered.
ANNOTATIONS = (
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex", "int8", "int32", "int64", "uint64"),
    *("float", "double", "decimal", "byte", "binary", "base64url", "password", "char", "html"),
    *("media-range", "commonmark", "sf-string", "color", "phone", "style", "unknown-to-all"),
)
SCHEMAS = yaml.safe_load(Path(__file__).with_name("json_schema.yaml").read_text("utf-8"))


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


@pytest.mark.parametrize("name", SCHEMAS["held"])
def test_a_format_that_the_library_knows_is_held(name: str):
    right, wrong = SCHEMAS["held"][name]
    schema = wrapped({"type": "string", "format": name})
    assert fits(schema, right)
    assert not fits(schema, wrong)


NEVER = [{"not": {}}, {"not": True}, False, {"anyOf": [{"not": {}}, False]}]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"), SCHEMAS["served"].values(), ids=SCHEMAS["served"]
)
def test_what_generators_write_is_served(schema: Any, right: object, wrong: object):
    whole = {**wrapped(schema), **SCHEMAS["around"]}
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
    with request_error("the grammar cannot be used") as caught:
        open_text(GrammarSpec("json_schema", json.dumps(schema)))
    return caught.value.message


@pytest.mark.parametrize("never", NEVER, ids=json.dumps)
def test_where_no_branch_is_left_the_schema_is_refused(never: Any):
    assert "'a' is unsatisfiable" in reason(wrapped({"anyOf": [never, never]}))
    assert "no schema that a value fits" in reason({"oneOf": [never]})
    assert "no schema that a value fits" in reason(never)


def test_a_schema_that_refers_to_itself_alone_is_refused():
    itself = {"$ref": "#/$defs/A"}
    assert "no text fits it" in reason({**itself, "$defs": {"A": itself}})


@pytest.mark.parametrize(
    ("keyword", "schema"), SCHEMAS["unserved"].items(), ids=SCHEMAS["unserved"]
)
def test_what_restricts_and_is_not_served_is_refused_with_its_place(
    keyword: str, schema: dict[str, Any]
):
    deep = {"anyOf": [{"type": "null"}, {"type": "array", "items": schema}]}
    assert f"used: properties.a.anyOf[1].items.{keyword} is " in reason(wrapped(deep))


@pytest.mark.parametrize("schema", SCHEMAS["unserved"].values(), ids=SCHEMAS["unserved"])
def test_a_schema_that_is_not_strict_is_held_without_it(schema: dict[str, Any]):
    value = {"array": [1], "object": {"b": "x"}}.get(schema.get("type", ""), "x")
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
    with request_error(r"format\.content\.json_schema\.properties\.a\.pattern"):
        open_text(GrammarSpec("structural_tag", source))
