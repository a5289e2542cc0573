"""Bodies of requests: refused by the name of the field that is wrong, ignored by name, or told to
the model.  The cases are those of bodies.yaml."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.client import GenerateRequest, Grammar, SamplingOptions
from cluster.errors import NotFoundError, RequestError
from cluster.requests.fields import GrammarSpec
from cluster.text.dialect import FORMATS, Dialect
from deployments.ingress.api.messages import AnthropicMessages
from deployments.ingress.body import parse_body
from deployments.ingress.grpc_request import to_spec
from deployments.ingress.openai_request import Chat, CompletionBody
from tests.deployments.test_contract import GOOD, Endpoint, parse
from tests.deployments.test_openai_request import LENIENT as PLAIN
from tests.deployments.test_openai_request import LIMITS, chat, completion, refused
from tests.deployments.test_tools import SERVED
from tests.support.choices import by_day
from tests.support.deployments.api import MODEL, Json

BODIES = yaml.safe_load(Path(__file__).with_name("bodies.yaml").read_text("utf-8"))
ENDPOINTS = {endpoint.path: endpoint for endpoint in GOOD}
STRICT = replace(LIMITS, dialect=Dialect(FORMATS["hermes"], template="{{ tools }}"))
LENIENT = replace(STRICT, config=PLAIN.config)


def cases(section: str) -> list[Any]:
    return [
        pytest.param(ENDPOINTS[path], *case, id=f"{path} {number}")
        for path, listed in BODIES[section].items()
        for number, case in enumerate(listed)
    ]


def with_fields(endpoint: Endpoint, fields: Json) -> Json:
    return {**GOOD[endpoint], **fields}


@pytest.mark.parametrize(("endpoint", "told", "fields"), cases("refused"))
def test_an_error_names_the_field_and_the_remedy(endpoint: Endpoint, told: str, fields: Json):
    """Types and bounds are below, and in test_contract.py."""
    param, *words = told.split(" ... ")
    error = refused(parse, endpoint, with_fields(endpoint, fields), SERVED)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert 400 <= error.http_status < 500
    assert len(error.message) < 300
    assert "1234567" not in error.message
    assert all(word in error.message for word in words)


@pytest.mark.parametrize(("endpoint", "names", "fields"), cases("ignored"))
def test_what_changes_nothing_is_ignored_and_named(
    endpoint: Endpoint, names: list[str], fields: Json
):
    body = with_fields(endpoint, fields)
    assert set(names) <= set(parse(endpoint, body, LENIENT).ignored)
    if names[0] not in BODIES["harmless"]:
        refused(parse, endpoint, body, STRICT)


@pytest.mark.parametrize(("endpoint", "param", "fields"), cases("never"))
def test_what_would_change_the_answer_is_refused_however_lenient(
    endpoint: Endpoint, param: str, fields: Json
):
    assert refused(parse, endpoint, with_fields(endpoint, fields), LENIENT).param == param


@pytest.mark.parametrize(("endpoint", "fields", "parts"), cases("parsed"))
def test_every_field_reaches_what_is_asked_for(endpoint: Endpoint, fields: Json, parts: Json):
    asked = parse(endpoint, with_fields(endpoint, fields), LIMITS)
    found = {path: attrgetter(path)(asked) for path in parts}
    assert json.loads(json.dumps(found)) == parts


@pytest.mark.parametrize(("endpoint", "fields", "messages"), cases("conversations"))
def test_a_conversation_reaches_the_template(endpoint: Endpoint, fields: Json, messages: list[Any]):
    (prompt,) = parse(endpoint, with_fields(endpoint, fields), LENIENT).spec.prompts
    assert [dict(message) for message in prompt.messages] == messages


@pytest.mark.parametrize(("fields", "kind", "source"), BODIES["forms"])
def test_each_form_becomes_a_grammar(fields: Json, kind: str, source: Any):
    for request in (
        Chat.parse(chat(**fields), LIMITS),
        CompletionBody.parse(completion(**fields), LIMITS),
    ):
        grammar = request.spec.params.grammar
        found = grammar and (grammar.kind, json.loads(grammar.source))
        assert found == (kind and (kind, source))


def test_a_grammars_text_is_taken_as_it_is_and_the_older_name_of_a_form_holds():
    for kind in ("regex", "grammar"):
        request = Chat.parse(chat(structured_outputs={kind: "[a-z]+"}), LIMITS)
        assert request.spec.params.grammar == GrammarSpec(kind, "[a-z]+")
    form = {"type": "json_schema", "schema": {"type": "object"}}
    older, newer = (
        parse(
            AnthropicMessages, with_fields(AnthropicMessages, fields), LENIENT
        ).spec.params.grammar
        for fields in ({"output_format": form}, {"output_config": {"format": form}})
    )
    assert older == newer is not None


@pytest.mark.parametrize(
    "name", ["gpt-5", "../x", "/etc/passwd", "demo/../../x", "demo\0", "~/x", "%2e%2e/x"]
)
def test_a_path_is_no_name_of_a_model(name: str):
    """Names are compared with those of the configuration, and nothing is looked for."""
    for error in (
        refused(Chat.parse, chat(model=name), LIMITS),
        refused(CompletionBody.parse, completion(model=name), LIMITS),
        refused(to_spec, GenerateRequest(model=name, text="hello"), LIMITS),
    ):
        assert isinstance(error, NotFoundError)
        assert "is not served; ask for 'demo'" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes):
    with pytest.raises(RequestError):
        parse_body(body)


def test_fields_that_are_null_are_absent():
    nothing = {"tools": None, "structured_outputs": None, "response_format": None}
    asked = Chat.parse(chat(**nothing), LIMITS).spec
    assert asked.params == Chat.parse(chat(), LIMITS).spec.params
    assert asked.prompts[0].tools == ()


def test_a_call_over_grpc_needs_no_model_where_one_is_served():
    assert to_spec(GenerateRequest(text="x"), LENIENT).adapter == ""
    for limits in (STRICT, replace(LENIENT, adapters={"poems": "poems"})):
        assert "model" in refused(to_spec, GenerateRequest(text="x"), limits).message


def with_grammar(kind: str, source: str) -> GenerateRequest:
    sampling = SamplingOptions(grammar=Grammar(kind=kind, source=source))
    return GenerateRequest(model="demo", text="x", sampling=sampling)


@pytest.mark.parametrize(("kind", "sources"), BODIES["sources"].items())
def test_a_source_over_grpc_is_a_grammar_or_refused_by_its_name(kind: str, sources: list[str]):
    good, *bad = sources
    assert to_spec(with_grammar(kind, good), LIMITS).params.grammar == GrammarSpec(kind, good)
    if kind == "json_schema":
        bad.append('{"a":' * 500 + "{}" + "}" * 500)
    for source in bad:
        error = refused(to_spec, with_grammar(kind, source), LIMITS)
        assert error.param == "sampling.grammar.source"


# Whatever is wrong at one place of a whole body, the error names that place.
WHOLE = {ENDPOINTS[path]: body for path, body in BODIES["whole"].items()}
WRONG = (5, -1, True, "x", "", [], {}, [5], [""], [{}], {"type": "x"}, 1e300, None)
# A field that only makes sense with another one may be named for it.
TOGETHER = {("tools", "tool_choice"), ("logprobs", "top_logprobs"), ("messages", "prompt")}


def places(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every path in a body, with the object or list that has it, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        name = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        yield name, value, key
        if isinstance(inner, dict | list):
            yield from places(inner, name)


def top(path: str) -> str:
    return path.partition(".")[0].partition("[")[0]


def is_near(param: str, path: str) -> bool:
    """Whether one is within the other, or a sibling of it in the same object."""
    around = path.rpartition(".")[0]
    return (
        param.startswith(path)
        or path.startswith(param)
        or bool(around and param.startswith(around))
        or (top(path), top(param)) in TOGETHER
    )


def errors(endpoint: Endpoint) -> Iterator[tuple[str, RequestError]]:
    """What each wrong value at each place is refused with."""
    for number, (path, *_) in enumerate(places(WHOLE[endpoint])):
        for value in WRONG:
            body = json.loads(json.dumps(WHOLE[endpoint]))  # nothing of it is there twice
            _, holder, key = list(places(body))[number]
            holder[key] = value
            try:
                parse(endpoint, body, SERVED)
            except RequestError as error:
                yield path, error


@pytest.mark.parametrize("endpoint", WHOLE, ids=lambda endpoint: endpoint.path)
def test_an_error_names_the_place_that_is_wrong(endpoint: Endpoint):
    """For some value of each place exactly that, or the list of texts that it is in, or what an
    object lacks: the name of a function."""
    parse(endpoint, WHOLE[endpoint], SERVED)
    named: dict[str, set[str]] = defaultdict(set)
    for path, error in errors(endpoint):
        param = error.param or ""
        assert is_near(param, path), (path, error.message)
        assert error.message.startswith(f"{param}: ")
        named[path].add(param)
    assert len(named) > 25
    for path, params in named.items():
        owner = path.rpartition("[")[0] if path.endswith("]") else f"{path}.name"
        assert params & {path, owner}, path


# Every number of a request at the edges of its type: a text, or a 400 that names the field.
NUMBERS = BODIES["numbers"]
EDGES = (*NUMBERS["edges"], "9" * 5000)
OTHERS = (*NUMBERS["others"], "9" * 400)
MEMBERS = {name: f'"{name}": %s' for name in NUMBERS["plain"]} | NUMBERS["members"]


@pytest.mark.parametrize("field", MEMBERS)
def test_a_completion_has_a_text_or_names_the_field(http: httpx.Client, field: str):
    start = f'{{"model": "{MODEL}", "prompt": "x y", "max_tokens": 2, '
    for number in by_day(EDGES, EDGES + OTHERS):
        text = start + MEMBERS[field] % number + "}"
        answer = http.post("/v1/completions", content=text)
        assert answer.status_code in (200, 400), (text[:200], answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["param"].startswith(field), (text[:200], answer.text)
        else:
            assert "NaN" not in answer.text, text[:200]
            assert "Infinity" not in answer.text, text[:200]
            json.loads(answer.text)


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity", "9" * 5000])
def test_a_number_in_a_schema_is_one(http: httpx.Client, number: str):
    schema = f'{{"type": "number", "maximum": {number}}}'
    for form, field in (
        (f'"structured_outputs": {{"json": {schema}}}', "structured_outputs.json"),
        (f'"structured_outputs": {{"json": {json.dumps(schema)}}}', "structured_outputs.json"),
        (
            f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
            "response_format.json_schema.schema",
        ),
    ):
        answer = http.post(
            "/v1/completions", content=f'{{"model": "{MODEL}", "prompt": "x", {form}}}'
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field)
