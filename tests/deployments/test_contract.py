"""The table of fields: complete, read by the parsers, told by /openapi.json and docs/api.md."""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from cluster.config.schema import ApiConfig
from cluster.core import SpeculationStats
from cluster.errors import RequestError
from cluster.requests.idle import IdleReason
from cluster.spec.statistics import combined
from deployments.ingress.api.contract import Body
from deployments.ingress.api.messages import AnthropicMessages, Counted, error_body
from deployments.ingress.api.pages import ENDPOINTS, body_schema, openapi
from deployments.ingress.api.response_request import Response
from deployments.ingress.openai_request import Chat, CompletionBody, Detokenize, Tokenize
from deployments.ingress.sampling import Sampling
from deployments.ingress.tools import ToolUse
from deployments.ingress.wording import Rule, Status, resolved, warning_header
from docs.tools import api
from docs.tools.fields import rules_of
from docs.tools.markdown import DOCS
from tests.deployments.test_openai_request import (
    CONFIG,
    LENIENT,
    LIMITS,
    chat,
    completion,
    refused,
)
from tests.support.deployments.api import Json

Endpoint = type[Body]
# A body that each endpoint serves.
GOOD: dict[Endpoint, Json] = {
    CompletionBody: completion(),
    Chat: chat(),
    Tokenize: {"prompt": "x"},
    Response: {"model": "demo", "input": "x"},
    AnthropicMessages: chat(max_tokens=1),
    Counted: chat(),
    Detokenize: {"tokens": [1]},
}
# What a field needs beside it.
NEEDS = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "max_tokens": {"prompt_logprobs": 0},
    "max_completion_tokens": {"prompt_logprobs": 0},
    "thinking": {"thinking": {"type": "enabled"}},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
}
ALL_RULES = [
    pytest.param(endpoint, rule, id=f"{endpoint.path} {rule.name}")
    for endpoint in ENDPOINTS
    for rule in rules_of(endpoint)
]


def rules(status: Status) -> list[Any]:
    return [each for each in ALL_RULES if each.values[1].status is status]


def body_with(endpoint: Endpoint, name: str, value: Any) -> Json:
    """A good body with `value` at the path `name`."""
    needed = copy.deepcopy(NEEDS.get(name.partition(".")[0], {}))
    usable = {key: value for key, value in needed.items() if key in endpoint.rules()}
    body = {**GOOD[endpoint], **usable}
    if name.startswith("messages"):
        body.pop("prompt", None)
    place, (*above, last) = body, name.replace("[]", "").split(".")
    for part in above:
        if part in ("input", "messages"):
            body[part] = [{"role": "user", "content": "x"}]
            place = body[part][0]
        else:
            place = place.setdefault(part, {})
    place[last] = value
    return body


def parse(endpoint: Any, body: Mapping[str, Any], limits: Any = LIMITS) -> Any:
    if issubclass(endpoint, Sampling):
        return endpoint.parse(body, limits)
    asked = endpoint.read(body, limits)
    if issubclass(endpoint, ToolUse):
        asked.prompt_of()
    return asked


def shown(name: str) -> str:
    return name.replace("[]", "[0]")


def test_a_field_that_a_new_version_adds_is_reported(monkeypatch: pytest.MonkeyPatch):
    known = api.fields_of
    monkeypatch.setattr(api, "fields_of", lambda path: known(path) | {"brand_new": "x"})
    with pytest.raises(SystemExit, match="/v1/completions: brand_new"):
        api.pages()


@pytest.mark.parametrize(("endpoint", "rule"), rules(Status.REFUSED))
def test_a_refused_field_is_refused_by_name_however_lenient(endpoint: Endpoint, rule: Rule):
    for limits in (LIMITS, LENIENT):
        for value in (None, *rule.harmless):
            parse(endpoint, body_with(endpoint, rule.name, value), limits)
        error = refused(parse, endpoint, body_with(endpoint, rule.name, "something else"), limits)
        assert error.param == shown(rule.name)
        assert rule.note in error.message


@pytest.mark.parametrize(("endpoint", "rule"), [*rules(Status.IGNORED), *rules(Status.UNNEEDED)])
def test_a_field_that_changes_nothing_is_ignored_and_named_or_refused_by_a_strict_server(
    endpoint: Endpoint, rule: Rule
):
    body, is_ignored = body_with(endpoint, rule.name, "anything"), rule.status is Status.IGNORED
    assert parse(endpoint, body, LIMITS if is_ignored else LENIENT).ignored == (rule.name,)
    if not is_ignored:
        assert refused(parse, endpoint, body).param == shown(rule.name)
    for value in (None, *rule.harmless):
        assert parse(endpoint, body_with(endpoint, rule.name, value)).ignored == ()


def test_a_field_without_effect_has_one_line_of_the_log(caplog: pytest.LogCaptureFixture):
    limits = replace(LENIENT, logged=set())
    turns = [{"role": "user", "content": "x", "mood": "good\r\n"}] * 3
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert Chat.parse(chat(messages=turns), limits).ignored == ("messages[].mood",)
            Chat.parse(chat(temprature=1), replace(limits, segment="another"))
        # A client may invent any number of names.
        for number in range(2000):
            Chat.parse(chat(**{f"made\nup{number}": 1}), limits)
    lines = [each.getMessage() for each in caplog.records]
    assert [line.rpartition(" ")[2] for line in lines[:2]] == ["messages[].mood", "temprature"]
    assert len(lines) == len(limits.logged) == 1000
    assert not any("\n" in line for line in lines)


def test_an_unknown_field_is_an_error_or_a_warning():
    for name in ("temprature", "speculation.depth", "messages[].mood", "stream_options.usage"):
        error = refused(Chat.parse, body_with(Chat, name, 5), LIMITS)
        assert error.param == shown(name)
        assert "unknown field" in error.message
        assert Chat.parse(body_with(Chat, name, 5), LENIENT).ignored == (name,)


def test_the_warning_holds_no_more_of_a_name_than_a_header_may():
    assert warning_header(()) == {}
    header = warning_header(["a\r\nb: c", "é", "input[].id"])["Warning"]
    assert header == '299 drafthouse "fields without effect: a??b??c, ?, input[].id"'
    assert warning_header(["x"] * 20)["Warning"].endswith('x and 4 more"')


@pytest.mark.parametrize(
    ("endpoint", "rule"),
    [each for each in ALL_RULES if each.values[1].is_required],
)
def test_a_required_field_is_missed_by_name(endpoint: Endpoint, rule: Rule):
    body = body_with(endpoint, rule.name, None)
    assert refused(parse, endpoint, body).param == shown(rule.name)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_the_required_fields_suffice(endpoint: Endpoint):
    needed = {rule.name for rule in rules_of(endpoint) if rule.is_required} | {
        "prompt"
    }  # or messages
    parse(endpoint, {k: v for k, v in GOOD[endpoint].items() if k in needed}, LENIENT)


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if "model" in GOOD[one]])
def test_a_body_needs_no_model_where_one_is_served(endpoint: Endpoint):
    body = {key: value for key, value in GOOD[endpoint].items() if key != "model"}
    other = replace(CONFIG, api=ApiConfig(served_model_names=("other",)))
    named = parse(endpoint, body, replace(LENIENT, config=other))
    assert getattr(named, "model", "demo") == "demo"
    for limits in (LIMITS, replace(LENIENT, adapters={"poems": "poems"})):
        assert refused(parse, endpoint, body, limits).param == "model"


def bounds(schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at and beyond the bounds of a schema, and whether it allows them."""
    schema = resolved(schema, LIMITS)
    step = 1 if schema.get("type") == "integer" else 0.25
    if "minimum" in schema and "exclusiveMinimum" not in schema:
        yield from ((schema["minimum"], True), (schema["minimum"] - step, False))
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], False
    if "maximum" in schema:
        yield from ((schema["maximum"], True), (schema["maximum"] + step, False))
    if schema.get("type") == "string" and "maxLength" in schema:
        yield "x" * (schema["maxLength"] + 1), False
    if schema.get("type") == "integer":
        yield 1.5, False
    if schema.get("type") == "array" and "maxItems" in schema:
        item = 1 if schema["items"].get("type") == "integer" else "x"
        yield [item] * (schema["maxItems"] + 1), False
    if schema.get("type") not in ("string", None):
        yield "x" * 3, False
    for one in schema.get("anyOf", ()):
        yield from ((value, good) for value, good in bounds(one) if good)


@pytest.mark.parametrize(("endpoint", "rule"), rules(Status.SUPPORTED))
def test_the_parser_and_the_schema_draw_the_same_bounds(endpoint: Endpoint, rule: Rule):
    whole = jsonschema.Draft202012Validator(body_schema(endpoint, LIMITS))
    for value, is_good in bounds(rule.schema or {}):
        body = body_with(endpoint, rule.name, value)
        if rule.name == "min_tokens" and is_good:
            is_response = endpoint is Response
            body["max_output_tokens" if is_response else "max_tokens"] = 2**31 - 1
        if rule.name in ("length_penalty", "early_stopping"):
            body["use_beam_search"] = True
        assert whole.is_valid(body) == is_good, value
        if is_good:
            parse(endpoint, body)
            continue
        assert (refused(parse, endpoint, body).param or "").startswith(shown(rule.name))


def test_the_openapi_document_has_bounds_errors_and_answers_that_are_none():
    document = openapi(LIMITS)
    validate(document)
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    fields = schema["application/json"]["schema"]["properties"]
    assert fields["n"]["anyOf"][0]["maximum"] == LIMITS.config.ingress.max_choices
    assert fields["suffix"]["enum"] == [None, ""]
    for endpoint in (AnthropicMessages, Counted):
        answer = document["paths"][endpoint.path]["post"]["responses"]["default"]
        name = answer["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        body = json.loads(error_body(RequestError("no"), "id"))
        jsonschema.validate(body, document["components"]["schemas"][name])
    assert "content" not in document["paths"]["/ping"]["get"]["responses"]["200"]
    # A server that cannot serve says who is missing, which is no error of the caller's.
    health = document["paths"]["/health"]["get"]["responses"]
    assert health["503"] == health["200"] != health["default"]


def test_the_document_and_grpc_have_every_word_and_the_statistics_of_every_answer():
    document: Any = openapi(LIMITS)
    schema = document["components"]["schemas"]["SpeculativeDecoding"]
    assert set(schema["properties"]["idle_because"]["enum"]) == {*IdleReason, None}
    for endpoint in (CompletionBody, Chat, Response, AnthropicMessages):
        content = document["paths"][endpoint.path]["post"]["responses"]["200"]["content"]
        answer = content["application/json"]["schema"]["properties"]
        found = answer["metrics"]["properties"]["speculative_decoding"]
        assert found == {"$ref": "#/components/schemas/SpeculativeDecoding"}
    proto = (DOCS.parent / "protos/drafthouse/v1/generation.proto").read_text("utf-8")
    comment = proto.partition("// Reason for no speculative step")[2].partition("string")[0]
    assert all(f'"{reason}"' in comment for reason in IdleReason)


def test_the_statistics_of_several_choices_add_up():
    accepted, verified = {"lm": 2, "suffix": 1}, {"lm": 6, "suffix": 4}
    first = SpeculationStats(
        9, 2, 8, 3, (0, 1, 1), accepted, "", verified, {"suffix": 2}, decode_time_s=1.5
    )
    second = SpeculationStats(4, 1, 2, 1, (0, 1), {"lm": 1}, "", {"lm": 2}, {}, 0.5)
    both = combined([first, second])
    assert sum(both.accepted_by_drafter.values()) == both.num_accepted_draft_tokens == 4
    assert both.shared_by_drafter == {"suffix": 2}
    assert both.verified_by_drafter == {"lm": 8, "suffix": 4}
    assert both.decode_time_s == 1.5
