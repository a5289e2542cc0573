"""Writes the OpenAPI document of /openapi.json, from the models that the parsers read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import ERRORS
from cluster.records import frozen
from deployments.ingress.api.contract import Body, PostEndpoint
from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.openai_request import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from deployments.ingress.spec import Limits
from deployments.ingress.usage import STATISTICS_PATH, statistics_schema, times_schema
from deployments.ingress.wording import Rule, Status, resolved

_DOCUMENT, _PAGES = yaml.safe_load_all(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@frozen
class GetEndpoint:
    """One endpoint without a body.

    handler: the method of `Pages`.  media_type: of its answers; empty = they have no content.
    statuses: of answers that are none of the errors.
    """

    method: str
    path: str
    handler: str
    summary: str
    media_type: str = "application/json"
    statuses: Sequence[str] = ("200",)


PAGES = tuple(GetEndpoint(*row) for row in _PAGES)
ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
_STATISTICS = "SpeculativeDecoding"


def openapi(limits: Limits, version: str) -> dict[str, Any]:
    """The document, for one served model and its limits."""
    document: dict[str, Any] = copy.deepcopy(_DOCUMENT)
    document["info"]["version"] = version
    schemas, paths = document["components"]["schemas"], document["paths"]
    schemas[_STATISTICS] = statistics_schema()
    error = schemas["Error"]["properties"]["error"]["properties"]
    error["code"]["enum"] = sorted(one.code for one in ERRORS)
    for page in PAGES:
        paths.setdefault(page.path, {})[page.method] = _page(page)
    for endpoint in ENDPOINTS:
        paths[endpoint.path] = {"post": _endpoint(endpoint, limits)}
    return document


def _page(page: GetEndpoint) -> dict[str, Any]:
    names = [part[1:-1] for part in page.path.split("/") if part.startswith("{")]
    answer: dict[str, Any] = {"description": page.summary}
    if page.media_type:
        answer["content"] = {page.media_type: {}}
    answers = dict.fromkeys(page.statuses, answer) | {"default": _error("Error")}
    found: dict[str, Any] = {"summary": page.summary, "responses": answers}
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return found


def _endpoint(endpoint: PostEndpoint, limits: Limits) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "object"}
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if "stream" in endpoint.body.rules():  # it generates
        answer["properties"] = _statistics()
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = body_schema(endpoint.body, limits)
    return {
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": _error("MessagesError" if endpoint in (MESSAGES, COUNT_TOKENS) else "Error"),
        },
    }


def _statistics() -> dict[str, Any]:
    """The properties of an answer that hold what it says of its times and of its drafts."""
    outer, inner = STATISTICS_PATH.split(".")
    schema = {"$ref": f"#/components/schemas/{_STATISTICS}"}
    return {outer: {"type": "object", "properties": {**times_schema(), inner: schema}}}


def _error(name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "why not", "content": {"application/json": {"schema": schema}}}


def body_schema(body: type[Body], limits: Limits) -> dict[str, Any]:
    """JSON Schema of a body."""
    rules = body.rules()
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _field(rule, limits) for name, rule in rules.items()},
        # Unknown fields of messages are refused too, unless they are empty.
        "additionalProperties": limits.is_lenient or body.is_listed,
    }
    required = [name for name, rule in rules.items() if rule.is_required]
    return schema | ({"required": required} if required else {})


def _field(rule: Rule, limits: Limits) -> dict[str, Any]:
    if rule.has_no_effect(is_lenient=limits.is_lenient):
        return {"description": f"Has no effect: {rule.note}."}
    if rule.status is not Status.SUPPORTED:
        return {"description": f"Refused: {rule.note}.", "enum": list(rule.harmless)}
    schema = resolved(rule.schema, limits)
    if rule.below is not None:
        below = body_schema(rule.below, limits)
        for option in (schema, *schema.get("anyOf", ())):
            if option.get("type") == "array":
                option["items"] = below
            elif option.get("type") == "object":
                option |= below
    if rule.is_required:
        return schema | {"description": rule.note}
    return {"description": rule.note, "anyOf": [schema, {"type": "null"}]}
