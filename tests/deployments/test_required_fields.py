"""A field that the table marks as required cannot be left out, and all others can."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from deployments.ingress.api.contract import Endpoint
from deployments.ingress.api.openapi import ENDPOINTS
from deployments.ingress.api.wording import Rule
from deployments.ingress.openai_request import TOKENIZE
from tests.deployments.test_contract import LENIENT, PARSERS, parse, shown
from tests.deployments.test_openai_request import LIMITS, refused

USER = {"role": "user", "content": "x"}
# What may be left out, and has fields that may not.
OBJECTS: dict[str, Any] = {
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "thinking": {"thinking": {"type": "enabled"}},
}
REQUIRED = [
    pytest.param(endpoint, rule, id=f"{endpoint.path} {rule.name}")
    for endpoint in ENDPOINTS
    for rule in endpoint.rules
    if rule.is_required
]


def body_of(endpoint: Endpoint) -> dict[str, Any]:
    body = copy.deepcopy(PARSERS[endpoint][0])
    if "messages" in endpoint.body.rules():
        body.pop("prompt", None)
        body["messages"] = [dict(USER)]
    return body


@pytest.mark.parametrize(("endpoint", "rule"), REQUIRED)
def test_a_required_field_is_missed_by_name(endpoint: Endpoint, rule: Rule) -> None:
    body = {**body_of(endpoint), **copy.deepcopy(OBJECTS.get(rule.name.partition(".")[0], {}))}
    place, _, name = rule.name.rpartition(".")
    inner = body[place.removesuffix("[]")] if place else body
    del (inner[0] if isinstance(inner, list) else inner)[name]
    assert refused(parse, endpoint, body).param == shown(rule.name)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_the_required_fields_suffice(endpoint: Endpoint) -> None:
    needed = {rule.name for rule in endpoint.rules if rule.is_required}
    if endpoint is TOKENIZE:
        needed.add("messages")  # or prompt
    body = {key: value for key, value in body_of(endpoint).items() if key in needed}
    parse(endpoint, body, LENIENT)


@pytest.mark.parametrize("endpoint", [one for one in ENDPOINTS if "model" in PARSERS[one][0]])
def test_a_body_needs_no_model_where_one_is_served(endpoint: Endpoint) -> None:
    body = {key: value for key, value in body_of(endpoint).items() if key != "model"}
    named = parse(endpoint, body, dataclasses.replace(LENIENT, aliases=("other",)))
    assert getattr(named, "model", LENIENT.model_name) == LENIENT.model_name
    for limits in (LIMITS, dataclasses.replace(LENIENT, adapters={"poems": "poems"})):
        assert refused(parse, endpoint, body, limits).param == "model"
