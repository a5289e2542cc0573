"""What requests may say of the form of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.client import GenerateRequest, Grammar, SamplingOptions
from cluster.requests.fields import GrammarSpec
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, CompletionBody
from tests.deployments.test_openai_request import LIMITS, chat, completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LENIENT = {**SCHEMA, "x-guidance": {"lenient": True}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
ASKED: list[tuple[dict[str, Any], str | None, Any]] = [
    ({"response_format": {"type": "text"}}, None, None),
    ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
            }
        },
        "json_schema",
        SCHEMA,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "json_schema",
        LENIENT,
    ),
    ({"response_format": TAG}, "structural_tag", TAG),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
    ({"structured_outputs": {"choice": ["b", "a", "b"]}}, "choice", ["b", "a"]),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, "structural_tag", TAG),
    ({"structured_outputs": {"json": None}}, None, None),
    (
        {"structured_outputs": {}, "response_format": {"type": "json_object"}},
        "json_schema",
        {"type": "object"},
    ),
]


@pytest.mark.parametrize(("fields", "kind", "source"), ASKED)
def test_each_form_becomes_a_grammar(fields: dict[str, Any], kind: str, source: Any) -> None:
    for request in (
        Chat.parse(chat(**fields), LIMITS),
        CompletionBody.parse(completion(**fields), LIMITS),
    ):
        grammar = request.spec.params.grammar
        if kind is None:
            assert grammar is None
            continue
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.source)) == (kind, source)


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_texts_are_taken_as_they_are(kind: str) -> None:
    request = Chat.parse(chat(structured_outputs={kind: "[a-z]+"}), LIMITS)
    assert request.spec.params.grammar == GrammarSpec(kind, "[a-z]+")


@pytest.mark.parametrize(
    "grammar",
    [
        GrammarSpec("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        GrammarSpec("choice", '["a","b"]'),
        GrammarSpec("regex", "a+"),
        GrammarSpec("grammar", "start: /a/"),
        GrammarSpec("structural_tag", json.dumps(TAG, separators=(",", ":"))),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_grpc_carries_every_kind(grammar: GrammarSpec) -> None:
    sampling = SamplingOptions(grammar=Grammar(kind=grammar.kind, source=grammar.source))
    asked = GenerateRequest(model="demo", text="hello", sampling=sampling)
    assert to_spec(asked, LIMITS).params.grammar == grammar
