"""The endpoints that generate nothing: models, versions, health, and the tokenizer."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.ingress.api.contract import warning_header
from deployments.ingress.api.openapi import openapi
from deployments.ingress.api.token_request import parse_detokenize, parse_tokenize
from deployments.ingress.body import read_object
from deployments.ingress.ingress import Ingress
from deployments.ingress.openai_request import check_model
from deployments.ingress.prompts import check_lengths, encode_all

_VERSION = importlib.metadata.version("drafthouse")


class Pages:
    """Answers GET requests, and those about tokens."""

    def __init__(self, ingress: Ingress, created: int) -> None:
        """created: when the model was created, as clients see it; seconds since 1970."""
        self._ingress = ingress
        self._created = created

    def routes(self) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
        """Every GET path with its handler."""
        return {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/version": self.version,
            "/ping": self.ping,
            "/health": self.health,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }

    async def models(self, request: Request) -> Response:
        cards = list(map(self._card, self._ingress.limits.model_names))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        check_model(name, self._ingress.limits)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "drafthouse",
            "root": self._ingress.limits.model_name,
            "parent": None,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        return self._ingress.coordinators.max_context_len or None

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION})

    async def ping(self, request: Request) -> Response:
        """For load balancers: says that this process answers, and nothing of the others."""
        return Response(status_code=200)

    async def health(self, request: Request) -> Response:
        state = await self._ingress.health()
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._ingress.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._ingress.limits, _VERSION))

    async def tokenize(self, request: Request) -> Response:
        """vLLM's /tokenize: the tokens of a text, or of a conversation."""
        ingress = self._ingress
        asked = await read_object(
            request, ingress.config.ingress, lambda values: parse_tokenize(values, ingress.limits)
        )
        settings = ingress.config.ingress
        check_lengths(
            [asked.prompt], ingress.coordinators.max_context_len, settings.max_chars_per_token
        )
        (token_ids,) = await encode_all(
            [asked.prompt], ingress.tokenizer, add_special_tokens=asked.add_special_tokens
        )
        strings = None
        if asked.return_token_strs:
            strings = [ingress.tokenizer.backend.id_to_token(token) for token in token_ids.tolist()]
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": self._max_model_len(),
                "tokens": token_ids.tolist(),
                "token_strs": strings,
            },
            headers=warning_header(asked.ignored),
        )

    async def detokenize(self, request: Request) -> Response:
        """vLLM's /detokenize: the text of tokens, special ones included."""
        ingress = self._ingress
        tokens = await read_object(
            request, ingress.config.ingress, lambda values: parse_detokenize(values, ingress.limits)
        )
        # A body of some megabytes holds many tokens.
        text = await asyncio.to_thread(ingress.tokenizer.decode, tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})
