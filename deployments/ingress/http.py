"""The HTTP API: OpenAI's paths, /health and /metrics, in one FastAPI application."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.errors import DrafthouseError, NotFoundError, RequestError
from deployments.ingress.api.contract import warning_header
from deployments.ingress.api.openapi import openapi
from deployments.ingress.body import read_object
from deployments.ingress.generation import Delta, Generation
from deployments.ingress.ingress import Ingress
from deployments.ingress.openai_error import error_event, error_response
from deployments.ingress.openai_request import check_model, parse_chat, parse_completion
from deployments.ingress.openai_response import DONE, Answer
from deployments.ingress.spec import Limits, OpenAIRequest

log = logging.getLogger(__name__)

# Encoding this many takes about two milliseconds.
_INLINE_LOGPROBS = 512

Endpoint = Callable[[Request], Awaitable[Response]]
Parser = Callable[[Mapping[str, Any], Limits], OpenAIRequest]


def create_app(ingress: Ingress) -> FastAPI:
    """Build the application, without generated documentation: it does not use FastAPI's schemas."""
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None, openapi_url=None)
    started = int(time.time())

    async def completions(request: Request) -> Response:
        return await _generate(ingress, request, "cmpl", parse_completion)

    async def chat_completions(request: Request) -> Response:
        return await _generate(ingress, request, "chatcmpl", parse_chat)

    async def models(request: Request) -> Response:
        cards = [_model_card(ingress, name, started) for name in ingress.limits.model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        check_model(name, ingress.limits)
        return JSONResponse(_model_card(ingress, name, started))

    async def health(request: Request) -> Response:
        state = await ingress.health()
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(await ingress.render_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def document(request: Request) -> Response:
        return JSONResponse(openapi(ingress.limits, importlib.metadata.version("drafthouse")))

    app.add_route("/openapi.json", _answering(document), methods=["GET"])
    app.add_route("/v1/completions", _answering(completions), methods=["POST"])
    app.add_route("/v1/chat/completions", _answering(chat_completions), methods=["POST"])
    app.add_route("/v1/models", _answering(models), methods=["GET"])
    app.add_route("/v1/models/{model:path}", _answering(model), methods=["GET"])
    app.add_route("/health", _answering(health), methods=["GET"])
    app.add_route("/metrics", _answering(metrics), methods=["GET"])
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


def _answering(endpoint: Endpoint) -> Endpoint:
    """Wrap `endpoint` so that every error becomes an answer in OpenAI's format."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except DrafthouseError as error:
            return error_response(error)
        except Exception as error:  # noqa: BLE001
            # A bug of ours must become an answer.  Its message may contain anything, including
            # prompt text, so only the location is logged.
            places = "".join(traceback.format_tb(error.__traceback__))
            log.error("unexpected %s at\n%s", type(error).__name__, places)
            return error_response(
                DrafthouseError("internal error; the server's log says where it happened")
            )

    return answer


def _model_card(ingress: Ingress, name: str, created: int) -> dict[str, Any]:
    """Of the model, or of an adapter, whose parent the model is."""
    adapter = ingress.limits.adapter_of(name)
    return {
        "id": name,
        "parent": ingress.config.model_name if adapter else None,
        "object": "model",
        "created": created,
        "owned_by": "drafthouse",
        "max_model_len": ingress.coordinators.max_context_len or None,
    }


async def _generate(ingress: Ingress, request: Request, prefix: str, parse: Parser) -> Response:
    try:
        asked = await read_object(
            request, ingress.config.ingress, lambda values: parse(values, ingress.limits)
        )
        generation = await ingress.generate(f"{prefix}-{uuid.uuid4().hex}", asked.spec)
    except ClientDisconnect:
        return Response(status_code=499)
    except DrafthouseError as error:
        ingress.count_refusal(error)
        raise
    answer = Answer(asked, generation, ingress.tokenizer, int(time.time()))
    pieces = generation.deltas()
    try:
        # Send the status line with the first text: until then the request can be refused.
        first: list[Delta] = await anext(pieces, [])
        if asked.stream:
            return _EventStream(generation, answer, first, pieces, warning_header(asked.ignored))
        collected = list(first)
        async for deltas in pieces:
            collected += deltas
        return Response(
            await _whole(answer, collected),
            media_type="application/json",
            headers=warning_header(asked.ignored),
        )
    except BaseException:
        generation.close()
        raise
    finally:
        if not asked.stream:
            generation.close()


async def _whole(answer: Answer, deltas: Sequence[Delta]) -> bytes:
    """Encode the whole answer, in another thread if it has many log-probabilities."""
    num_logprobs = sum(1 + len(one.top) for delta in deltas for one in delta.logprobs)
    if num_logprobs <= _INLINE_LOGPROBS:
        return answer.whole(deltas)
    return await asyncio.to_thread(answer.whole, deltas)


class _EventStream(Response):
    """Sends server-sent events; closes the generation at the end, also if cancelled."""

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        first: list[Delta],
        pieces: AsyncIterator[list[Delta]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            # Proxies must forward every event at once.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._first = first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_disconnected(receive))
        sending = asyncio.ensure_future(self._send(send))
        try:
            await asyncio.wait((gone, sending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            for task in (gone, sending):
                task.cancel()
            results = await asyncio.gather(gone, sending, return_exceptions=True)
        if isinstance(results[1], Exception):
            raise results[1]

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for body in self._bodies():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bodies(self) -> AsyncIterator[bytes]:
        try:
            yield self._answer.opening() + self._answer.chunks(self._first)
            async for deltas in self._pieces:
                yield self._answer.chunks(deltas)
        except DrafthouseError as error:
            log.warning("stream id=%s ended with an error: %s", self._generation.id, error.code)
            yield error_event(error) + DONE
            return
        yield self._answer.closing()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer requests that the router refuses: an unknown path or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    path, method = request.url.path[:200], request.method
    if status == 404:
        return error_response(NotFoundError(f"{path}: no such path; see /v1/models"))
    response = error_response(RequestError(f"{method} {path}: the method is not served here"))
    response.status_code = status
    response.headers.update(getattr(error, "headers", None) or {})
    return response
