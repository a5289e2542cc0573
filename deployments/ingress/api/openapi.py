"""Writes the OpenAPI document of /openapi.json, from the models that the parsers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ERRORS
from cluster.records import frozen
from deployments.ingress.api.contract import Body, Endpoint
from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.api.wording import Rule, Status, resolved
from deployments.ingress.openai_request import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from deployments.ingress.spec import Limits
from deployments.ingress.usage import STATISTICS_PATH, statistics_schema, times_schema


@frozen
class Page:
    """One endpoint without a body.

    handler: the method of `Pages`.  media_type: of its answers; empty = they have no content.
    statuses: of answers that are none of the errors.
    """

    path: str
    handler: str
    summary: str
    media_type: str = "application/json"
    method: str = "get"
    statuses: tuple[str, ...] = ("200",)


PAGES = (
    Page(
        "/", "front", "What this is, its model and its endpoints; for browsers a page", "text/plain"
    ),
    Page("/docs", "front", "The same as text, or HTML for browsers", "text/plain"),
    Page("/v1/models", "models", "The served models"),
    Page("/v1/models/{model}", "model", "One model"),
    Page("/v1/responses/{response_id}", "response", "An answer of /v1/responses that is kept"),
    Page("/v1/responses/{response_id}", "forget_response", "Forget that answer", method="delete"),
    Page("/ui/about", "about", "The model and its drafters, for the page at /"),
    Page("/version", "version", "The server's version"),
    Page("/ping", "ping", "200, for load balancers", ""),
    Page("/health", "health", "Who serves, and whether that suffices", statuses=("200", "503")),
    Page("/metrics", "metrics", "Prometheus' metrics", "text/plain"),
    Page("/stats", "stats", "The most important metrics, as JSON"),
    Page("/openapi.json", "openapi", "This document"),
)

ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)


_TEXT = {"type": "string"}
_MESSAGE = {**_TEXT, "description": "the value and the remedy"}
_PARAM = {"type": ["string", "null"], "description": "the field at fault"}
_CODE = {**_TEXT, "enum": sorted(one.code for one in ERRORS)}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


_ERROR = _object(
    {"error": _object({"message": _MESSAGE, "type": _TEXT, "param": _PARAM, "code": _CODE})}
)
_OF_MESSAGES = _object({"type": _TEXT, "message": _MESSAGE})
_MESSAGES_ERROR = _object({"type": {"const": "error"}, "error": _OF_MESSAGES, "request_id": _TEXT})
_STATISTICS = "SpeculativeDecoding"


def openapi(limits: Limits, version: str) -> dict[str, Any]:
    """The document, for one served model and its limits."""
    paths: dict[str, Any] = {}
    for page in PAGES:
        paths.setdefault(page.path, {})[page.method] = _page(page)
    for endpoint in ENDPOINTS:
        paths[endpoint.path] = {"post": _endpoint(endpoint, limits)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Drafthouse",
            "version": version,
            "description": "OpenAI's HTTP API, with vLLM's extensions and speculation per request.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {
                "Error": _ERROR,
                "MessagesError": _MESSAGES_ERROR,
                _STATISTICS: statistics_schema(),
            }
        },
    }


def _page(page: Page) -> dict[str, Any]:
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


def _endpoint(endpoint: Endpoint, limits: Limits) -> dict[str, Any]:
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


def body_schema(body: type[Body], limits: Limits, *, is_item: bool = False) -> dict[str, Any]:
    """JSON Schema of a body.  is_item: it stands in a list."""
    rules = body.rules()
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _field(rule, limits) for name, rule in rules.items()},
        # Unknown fields of messages are refused too, unless they are empty.
        "additionalProperties": limits.is_lenient or is_item,
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
        for option in (schema, *schema.get("anyOf", ())):
            if option.get("type") == "array":
                option["items"] = body_schema(rule.below, limits, is_item=True)
            elif option.get("type") == "object":
                option |= body_schema(rule.below, limits)
    if rule.is_required:
        return schema | {"description": rule.note}
    return {"description": rule.note, "anyOf": [schema, {"type": "null"}]}
