"""Reads what an answer must be: `response_format` and `structured_outputs`."""

from __future__ import annotations

import json
from typing import Any

from cluster.errors import RequestError
from cluster.requests.grammar_spec import GrammarSpec
from cluster.text.json_text import parse_json
from deployments.ingress.fields import Fields, encodable, encodable_json, json_kind, shown

_MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_ANY_OBJECT = '{"type": "object"}'


def read_grammar(fields: Fields) -> tuple[GrammarSpec | None, str]:
    """The grammar that the body asks for, and the field that it comes from, "" for none; raises
    RequestError where it names two."""
    outputs, wanted = fields.object("structured_outputs"), fields.object("response_format")
    found = (None, "") if outputs is None else _outputs(outputs)
    if wanted is None:
        return found
    format_ = _format(wanted)
    if found[0] is not None and format_[0] is not None:
        raise fields.wrong(
            "response_format", "structured_outputs says what the answer must be, too; send one"
        )
    return found if format_[0] is None else format_


def _format(fields: Fields) -> tuple[GrammarSpec | None, str]:
    fields.refuse_others("type", "json_schema", "format", "structures", "triggers")
    kind = fields.string("type", "", max_len=64)
    if kind == "text":
        return None, ""
    if kind == "json_object":
        return GrammarSpec("json_schema", _ANY_OBJECT), "response_format"
    if kind == "structural_tag":
        tag = grammar_of(kind, dict(fields.values()), "response_format")
        return tag, "response_format"
    if kind != "json_schema":
        reason = f"{shown(kind)}; send text, json_object, json_schema or structural_tag"
        raise fields.wrong("type", reason)
    named = fields.object("json_schema")
    if named is None:
        raise fields.wrong("json_schema", "missing; send a name and a schema")
    named.refuse_others("name", "description", "schema", "strict")
    named.string("name", "", max_len=64)
    named.string("description", "", max_len=65536)
    # The schema holds either way: an answer that is not asked to be strict may be so too.
    named.boolean("strict", default=False)
    return schema_grammar(named.get("schema"), named.name("schema")), named.name("schema")


def _outputs(fields: Fields) -> tuple[GrammarSpec | None, str]:
    kinds = [kind for kind in KINDS if fields.get(kind) is not None]
    if "json_object" in kinds and not fields.boolean("json_object", default=False):
        kinds.remove("json_object")
    if not kinds:
        return None, ""
    if len(kinds) > 1:
        raise RequestError.at(
            "structured_outputs", f"{' and '.join(kinds)} are set; send one of them"
        )
    (kind,) = kinds
    if kind == "json_object":
        return GrammarSpec("json_schema", _ANY_OBJECT), fields.name(kind)
    return grammar_of(kind, fields.get(kind), fields.name(kind)), fields.name(kind)


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
