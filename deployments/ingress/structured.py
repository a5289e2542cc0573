"""Reads what an answer must be: `response_format` and `structured_outputs`."""

from __future__ import annotations

import difflib
import json
from typing import Any

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.text.json_text import parse_json
from deployments.ingress.fields import Fields, encodable, encodable_json, json_kind, shown

_MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_ANY_OBJECT = '{"type": "object"}'


def read_grammar(fields: Fields) -> GrammarSpec | None:
    """The grammar that the body asks for; raises RequestError where it names two."""
    asked = fields.get("structured_outputs")
    outputs = None if asked is None else _outputs(Fields.of(asked, "structured_outputs"))
    wanted = fields.get("response_format")
    format_ = None if wanted is None else _format(Fields.of(wanted, "response_format"))
    if outputs is not None and format_ is not None:
        raise RequestError.at(
            "response_format", "structured_outputs says what the answer must be, too; send one"
        )
    return outputs or format_


def grammar_field(fields: Fields) -> str:
    """The field that `read_grammar` has found its grammar in, "" for none."""
    outputs, format_ = fields.get("structured_outputs"), fields.get("response_format")
    for kind in KINDS if outputs else ():
        if outputs.get(kind) is not None and outputs.get(kind) is not False:
            return f"structured_outputs.{kind}"
    if format_ is None:
        return ""
    is_schema = format_.get("type") == "json_schema"
    return "response_format.json_schema.schema" if is_schema else "response_format"


def refuse_others(fields: Fields, *names: str) -> None:
    """Raise RequestError for the first key that is not one of `names`."""
    for key in fields.values():
        if key not in names:
            name = fields.name(key[:40])
            near = difflib.get_close_matches(key[:40], names, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise RequestError.at(name, f"unknown field; {hint}")


def _format(fields: Fields) -> GrammarSpec | None:
    refuse_others(fields, "type", "json_schema", "format", "structures", "triggers")
    kind = fields.string("type", "", max_len=64)
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_schema", _ANY_OBJECT)
    if kind == "structural_tag":
        return grammar_of(kind, dict(fields.values()), "response_format")
    if kind != "json_schema":
        raise RequestError.at(
            "response_format.type",
            f"{shown(kind)}; send text, json_object, json_schema or structural_tag",
        )
    path = "response_format.json_schema"
    if fields.get("json_schema") is None:
        raise RequestError.at(path, "missing; send a name and a schema")
    named = Fields.of(fields.get("json_schema"), path)
    refuse_others(named, "name", "description", "schema", "strict")
    named.string("name", "", max_len=64)
    named.string("description", "", max_len=65536)
    # The schema holds either way: an answer that is not asked to be strict may be so too.
    named.boolean("strict", default=False)
    return schema_grammar(named.get("schema"), f"{path}.schema")


def _outputs(fields: Fields) -> GrammarSpec | None:
    kinds = [kind for kind in KINDS if fields.get(kind) is not None]
    if "json_object" in kinds and not fields.boolean("json_object", default=False):
        kinds.remove("json_object")
    if not kinds:
        return None
    if len(kinds) > 1:
        raise RequestError.at(
            "structured_outputs", f"{' and '.join(kinds)} are set; send one of them"
        )
    (kind,) = kinds
    if kind == "json_object":
        return GrammarSpec("json_schema", _ANY_OBJECT)
    return grammar_of(kind, fields.get(kind), f"structured_outputs.{kind}")


def grammar_of(kind: str, value: Any, path: str) -> GrammarSpec:
    """The grammar of one of vLLM's kinds; raises RequestError, naming `path`, for what is none."""
    if kind == "json":
        return schema_grammar(_parsed(value, path), path)
    if kind == "choice":
        if not isinstance(value, list) or not value:
            what = "an empty list" if isinstance(value, list) else json_kind(value)
            raise RequestError.at(path, f"{what}; send a list with at least one text")
        texts = Fields({path: value}).strings(path, _MAX_CHOICES, max_len=65536) or ()
        return GrammarSpec("choice", _dumped(list(dict.fromkeys(texts))))
    if kind == "structural_tag":
        tag = Fields.of(_parsed(value, path), path).values()
        return GrammarSpec("structural_tag", _dumped(encodable_json(tag, path)))
    if not isinstance(value, str) or not value:
        what = "empty" if value == "" else json_kind(value)
        raise RequestError.at(path, f"{what}; send a text with at least one character")
    return GrammarSpec(kind, encodable(value, path))


def schema_grammar(schema: Any, path: str) -> GrammarSpec:
    """The grammar of a JSON schema; raises RequestError for what is none."""
    if schema is None:
        raise RequestError.at(path, "missing; send a JSON schema")
    if not isinstance(schema, dict):
        raise RequestError.at(path, f"{json_kind(schema)}; send a JSON schema")
    return GrammarSpec("json_schema", _dumped(encodable_json(schema, path)))


def _parsed(value: Any, path: str) -> Any:
    """vLLM takes schemas as objects, and as texts of them."""
    return parse_json(value, path) if isinstance(value, str) else value


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
