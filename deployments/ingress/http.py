"""The HTTP API: every path with its endpoint, in one FastAPI application."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from cluster.errors import ContextLengthError, DrafthouseError, NotFoundError, RequestError
from cluster.records import frozen
from deployments.ingress.api.contract import Endpoint
from deployments.ingress.api.messages import COUNT_TOKENS, MESSAGES
from deployments.ingress.api.messages import error_body as messages_error
from deployments.ingress.api.messages_writer import MessagesWriter
from deployments.ingress.api.pages import Pages
from deployments.ingress.api.response_request import RESPONSES
from deployments.ingress.api.response_writer import ResponseWriter
from deployments.ingress.api.unserved import reason_of
from deployments.ingress.api.wording import warning_header
from deployments.ingress.api.writer import Writer
from deployments.ingress.body import read_object
from deployments.ingress.choice import Delta
from deployments.ingress.event_stream import EventStream, answered, while_connected
from deployments.ingress.generation import Generation
from deployments.ingress.http_protocol import AT_ONCE
from deployments.ingress.ingress import Ingress
from deployments.ingress.keys import ANYBODY, Operators
from deployments.ingress.openai_error import ErrorBody, error_body, error_response, hidden
from deployments.ingress.openai_request import CHAT, COMPLETIONS
from deployments.ingress.openai_response import Answer
from deployments.ingress.request_scope import (
    REQUEST_ID,
    SEGMENT,
    SILENT,
    TIMEOUT,
    BrowserGuard,
    RequestScope,
    request_id_of,
    timeout_of,
)
from deployments.ingress.sampling import Sampling
from deployments.page.routes import PageFiles

# Encoding this many takes about two milliseconds.
_INLINE_LOGPROBS = 512
EVENTS = "/ui/events"

Handler = Callable[[Request], Awaitable[Response]]


@frozen
class Face:
    """One endpoint that generates.

    answer_id: of the answer, from that of the HTTP request.  write: makes the answer's writer.
    error: writes what goes wrong.
    """

    endpoint: Endpoint
    answer_id: Callable[[str], str]
    write: Callable[[Any, Generation, str], Writer[Any]]
    error: ErrorBody = error_body


FACES = (
    Face(COMPLETIONS, "cmpl-{}".format, Answer),
    Face(CHAT, "chatcmpl-{}".format, Answer),
    # A client chooses its requests' ids, and whoever knows an answer's may read it.
    Face(RESPONSES, lambda _: f"resp_{uuid.uuid4().hex}", ResponseWriter),
    Face(MESSAGES, "msg_{}".format, MessagesWriter, messages_error),
)


def create_app(ingress: Ingress) -> FastAPI:
    """Build the application."""
    api, app = ingress.config.api, _empty_app()
    pages = Pages(ingress, int(time.time()), Operators(ingress.config, ingress.keys))
    files = PageFiles() if ingress.config.ui.is_served(ingress.config.http) else None
    for method, path, page in pages.routes():
        endpoint = answering(ingress, path, page)
        if files is not None and path == "/":
            endpoint = files.before(endpoint)
        app.add_route(path, endpoint, methods=[method])
    if files is not None:
        app.routes.append(files.route())
        app.add_route(EVENTS, answering(ingress, EVENTS, pages.events), methods=["GET"])
    counted = answering(ingress, COUNT_TOKENS.path, pages.count_tokens, messages_error)
    app.add_route(COUNT_TOKENS.path, counted, methods=["POST"])
    for face in FACES:
        path = face.endpoint.path
        generate = answering(ingress, path, partial(_generate, ingress, face), face.error)
        app.add_route(path, generate, methods=["POST"])
    if api.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(api.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, TIMEOUT, "Retry-After", "Warning"],
        )
    config = ingress.config
    guard = BrowserGuard(config.http, api.cors_origins)
    is_logged = config.ingress.log_requests
    app.add_middleware(RequestScope, config.http, is_logged=is_logged, check=guard.check)
    return app


def create_admin_app(ingress: Ingress) -> FastAPI:
    """Build the application of `access.admin.port`: it tells everybody how the server does."""
    app = _empty_app()
    pages = Pages(ingress, 0, Operators.everybody())
    for method, path, page in pages.routes():
        if path in SILENT:
            app.add_route(path, answering(ingress, path, page), methods=[method])
    app.add_middleware(RequestScope, ingress.config.http, is_logged=False)
    return app


def _empty_app() -> FastAPI:
    # /openapi.json is our own: FastAPI knows nothing of the bodies.
    app = FastAPI(title="Drafthouse", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _on_http_exception)
    return app


def answering(
    ingress: Ingress, path: str, handler: Handler, body: ErrorBody = error_body
) -> Handler:
    """Wrap `handler` so that it knows who asks, and every error becomes an answer in the endpoint's
    format."""

    async def answer(request: Request) -> Response:
        request_id = request_id_of(request)
        request.state.route = path
        try:
            is_asked = path not in SILENT
            request.state.caller = ingress.caller(request.headers) if is_asked else ANYBODY
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except DrafthouseError as error:
            return error_response(error, request_id, body)
        except Exception as error:  # noqa: BLE001
            return error_response(hidden(error, request_id), request_id, body)

    return answer


async def _generate(ingress: Ingress, face: Face, request: Request) -> Response:
    request_id = request_id_of(request)
    caller = request.state.caller
    limits = ingress.limits_of(caller, request.headers.get(SEGMENT, ""))
    try:
        timeout_s = timeout_of(request)
        form: type[Sampling] = face.endpoint.body
        asked = await read_object(
            request, ingress.config.ingress, lambda values: form.parse(values, limits)
        )
        generation = await ingress.generate(
            face.answer_id(request_id),
            asked.spec,
            timeout_s=timeout_s,
            caller=caller,
            traceparent=request.headers.get("traceparent", ""),
        )
    except DrafthouseError as error:
        ingress.count_refusal(error)
        if isinstance(error, ContextLengthError) and face.endpoint is RESPONSES and asked.stream:
            return _failed_stream(ingress, face, asked, error, request_id)
        raise
    is_streaming = False
    try:
        writer = face.write(asked, generation, request_id)
        headers = warning_header(asked.ignored)
        # The status line of a stream is sent once it is admitted: until then it can be refused.
        if asked.stream and _may_be_sent_piecemeal(request):
            await while_connected(request.receive, generation.admitted())
            is_streaming = True
            events, heartbeat_s = answered(generation, writer), ingress.config.api.heartbeat_s
            return EventStream(events, headers, heartbeat_s, generation.close)
        collected = await while_connected(request.receive, _all_deltas(generation))
        if asked.stream:
            told = writer.opening() + writer.chunks(collected) + writer.closing()
            return Response(told, media_type="text/event-stream", headers=headers)
        body = await _whole(writer, collected, generation.num_prompt_logprobs)
        return Response(body, media_type="application/json", headers=headers)
    finally:
        if not is_streaming:
            generation.close()


def _may_be_sent_piecemeal(request: Request) -> bool:
    """False for clients of HTTP/1.0, which know no chunks, behind Serve's proxies, which send some:
    they get a stream in one piece, with its length."""
    scope = request.scope
    return scope["http_version"] >= "1.1" or AT_ONCE in scope.get("extensions", ())


def _failed_stream(
    ingress: Ingress, face: Face, asked: Sampling, error: DrafthouseError, request_id: str
) -> Response:
    """Answer as OpenAI's Responses does where a prompt fills the context: clients that compact the
    conversation then look for the event, and not at the status."""
    generation = Generation(
        face.answer_id(request_id), asked.spec, ingress.tokenizer, ingress.coordinators, 1.0
    )
    writer = face.write(asked, generation, request_id)
    return Response(writer.opening() + writer.failing(error), media_type="text/event-stream")


async def _all_deltas(generation: Generation) -> list[Delta]:
    return [delta async for deltas in generation.deltas() for delta in deltas]


async def _whole(writer: Writer[Any], deltas: Sequence[Delta], num_prompt_logprobs: int) -> bytes:
    """Encode the whole answer, in another thread if it has many log-probabilities."""
    num_logprobs = num_prompt_logprobs + sum(
        1 + len(one.top) for delta in deltas for one in delta.logprobs
    )
    if num_logprobs <= _INLINE_LOGPROBS:
        return writer.whole(deltas)
    return await asyncio.to_thread(writer.whole, deltas)


def _allowed(request: Request) -> str:
    """Return the methods of a path; the router knows only those of the first route that fits."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join([*sorted(methods), "OPTIONS"])


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer requests that the router refuses: an unknown path or a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    path, method, request_id = request.url.path[:200], request.method, request_id_of(request)
    if status == 404:
        reason = reason_of(path) or "no such path; see /"
        return error_response(NotFoundError(f"{path}: {reason}"), request_id)
    headers = dict(getattr(error, "headers", None) or {}) | {"Allow": _allowed(request)}
    if method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    refusal = RequestError(f"{method} {path}: the method is not served here")
    response = error_response(refusal, request_id)
    response.status_code = status
    response.headers.update(headers)
    return response
