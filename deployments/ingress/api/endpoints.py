"""Every path of the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.api.token_request import DETOKENIZE, TOKENIZE
from deployments.ingress.openai_request import CHAT, COMPLETIONS


@dataclass(frozen=True, slots=True)
class Page:
    """One endpoint without a body.

    media_type: of its answers; empty = they have no content.  statuses: of answers that are none of
    the errors.
    """

    path: str
    summary: str
    media_type: str = "application/json"
    method: str = "get"
    statuses: tuple[str, ...] = ("200",)


PAGES = (
    Page("/", "What this is, its model and its endpoints; for browsers a page", "text/plain"),
    Page("/docs", "The same as text, or HTML for browsers", "text/plain"),
    Page("/v1/models", "The served models"),
    Page("/v1/models/{model}", "One model"),
    Page("/v1/responses/{response_id}", "An answer of /v1/responses that is kept"),
    Page("/v1/responses/{response_id}", "Forget that answer", method="delete"),
    Page("/ui/about", "The model and its drafters, for the page at /"),
    Page("/version", "The server's version"),
    Page("/ping", "200, for load balancers", ""),
    Page("/health", "Who serves, and whether that suffices", statuses=("200", "503")),
    Page("/metrics", "Prometheus' metrics", "text/plain"),
    Page("/stats", "The most important metrics, as JSON"),
    Page("/openapi.json", "This document"),
)

ENDPOINTS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
