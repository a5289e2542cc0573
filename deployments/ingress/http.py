"""The HTTP API: every path with its endpoint, in one application."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from cluster.config.schema import Config
from cluster.errors import ContextLengthError, DrafthouseError, NotFoundError, RequestError
from cluster.records import frozen
from deployments.ingress.api.messages import AnthropicMessages, MessagesWriter
from deployments.ingress.api.messages import error_body as messages_error
from deployments.ingress.api.pages import Pages
from deployments.ingress.api.response_request import Response as ResponseBody
from deployments.ingress.api.response_writer import ResponseWriter
from deployments.ingress.api.writer import Writer
from deployments.ingress.body import error_body, error_response, hidden, read_object
from deployments.ingress.choice import Delta
from deployments.ingress.event_stream import EventStream, answered, while_connected
from deployments.ingress.generation import Generation
from deployments.ingress.ingress import Ingress
from deployments.ingress.keys import ANYBODY, KeyRing
from deployments.ingress.openai_request import Chat, CompletionBody
from deployments.ingress.openai_response import Answer
from deployments.ingress.request_scope import (
    REQUEST_ID,
    SILENT,
    TIMEOUT,
    BrowserGuard,
    RequestScope,
    timeout_of,
)
from deployments.ingress.sampling import Sampling
from deployments.ingress.wording import reason_of, warning_header
from deployments.page.routes import Handler, PageFiles

EVENTS = "/ui/events"


@frozen
class Face:
    """One endpoint that generates.

    answer_id: of the answer, from that of the HTTP request.  write: makes the answer's writer.
    """

    body: type[Sampling]
    answer_id: Callable[[str], str]
    write: Callable[[Any, Generation, str], Writer]


FACES = (
    Face(CompletionBody, "cmpl-{}".format, Answer),
    Face(Chat, "chatcmpl-{}".format, Answer),
    # A client chooses its requests' ids, and whoever knows an answer's may read it.
    Face(ResponseBody, lambda _: f"resp_{uuid.uuid4().hex}", ResponseWriter),
    Face(AnthropicMessages, "msg_{}".format, MessagesWriter),
)


def create_app(ingress: Ingress) -> Starlette:
    """Build the application."""
    config = ingress.config
    pages = Pages(ingress, int(time.time()), ingress.keys)
    files = PageFiles() if config.ui.is_served(config.http) else None
    routes: list[BaseRoute] = []
    handlers = pages.routes()
    handlers += [("POST", face.body.path, partial(_generate, ingress, face)) for face in FACES]
    for method, path, handler in handlers:
        endpoint = answering(ingress, path, handler)
        if files is not None and path == "/":
            endpoint = files.before(endpoint)
        routes.append(Route(path, endpoint, methods=[method]))
    if files is not None:
        routes += [files.route(), Route(EVENTS, answering(ingress, EVENTS, pages.events))]
    app, origins = _routed(routes), config.api.cors_origins
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, TIMEOUT, "Retry-After", "Warning"],
        )
    # Outside of all others: it answers what they refuse, too.
    guard, is_logged = BrowserGuard(config.http, origins), config.ingress.log_requests
    app.add_middleware(RequestScope, is_logged=is_logged, check=guard.check)
    return app


def create_admin_app(ingress: Ingress) -> Starlette:
    """Build the application of `access.admin.port`: it tells everybody how the server does."""
    routes = [
        Route(path, answering(ingress, path, handler), methods=[method])
        for method, path, handler in Pages(ingress, 0, KeyRing(Config())).routes()
        if path in SILENT
    ]
    app = _routed(routes)
    app.add_middleware(RequestScope, is_logged=False)
    return app


def _routed(routes: Sequence[BaseRoute]) -> Starlette:
    return Starlette(routes=routes, exception_handlers={HTTPException: _on_http_exception})


def answering(ingress: Ingress, path: str, handler: Handler) -> Handler:
    """Wrap `handler` so that it knows who asks, and every error becomes an answer in the endpoint's
    format."""
    body = messages_error if path.startswith(AnthropicMessages.path) else error_body

    async def answer(request: Request) -> Response:
        request_id = request.state.request_id
        request.state.route = path
        try:
            request.state.caller = ANYBODY if path in SILENT else ingress.caller(request.headers)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001
            return error_response(hidden(error, request_id), request_id, body)

    return answer


async def _generate(ingress: Ingress, face: Face, request: Request) -> Response:
    request_id = request.state.request_id
    caller = request.state.caller
    limits = ingress.limits(caller, request.headers)
    try:
        with ingress.counting_refusals():
            timeout_s = timeout_of(request)
            asked = await read_object(request, limits, face.body.parse)
            generation = await while_connected(
                request.receive,
                ingress.generate(
                    face.answer_id(request_id),
                    asked.spec,
                    timeout_s=timeout_s,
                    caller=caller,
                    traceparent=request.headers.get("traceparent", ""),
                ),
            )
    except ContextLengthError as error:
        if face.body is ResponseBody and asked.stream:
            return _failed_stream(ingress, face, asked, error, request_id)
        raise
    is_streaming = False
    try:
        writer = face.write(asked, generation, request_id)
        headers = warning_header(asked.ignored)
        # The status line of a stream is sent once it is admitted: until then it can be refused.
        if asked.stream:
            await while_connected(request.receive, generation.admitted())
            is_streaming = True
            events, heartbeat_s = answered(generation, writer), ingress.config.api.heartbeat_s
            return EventStream(events, headers, heartbeat_s, generation.close)
        collected = await while_connected(request.receive, _all_deltas(generation))
        if asked.spec.params.logprobs is None and asked.spec.prompt_logprobs is None:
            body = writer.whole(collected)
        else:  # many log-probabilities take a while to write
            body = await asyncio.to_thread(writer.whole, collected)
        return Response(body, media_type="application/json", headers=headers)
    finally:
        if not is_streaming:
            generation.close()


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


def _allowed(request: Request) -> str:
    """Return the methods of a path; the router knows only those of the first route that fits."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join([*sorted(methods), "OPTIONS"])


async def _on_http_exception(request: Request, error: Any) -> Response:
    """Answer requests that the router refuses: an unknown path or a wrong method."""
    status, path, method = error.status_code, request.url.path[:200], request.method
    request_id = request.state.request_id
    if status == 404:
        reason = reason_of(path) or "no such path; see /"
        return error_response(NotFoundError(f"{path}: {reason}"), request_id)
    headers = {"Allow": _allowed(request)}
    if method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    response = error_response(
        RequestError(f"{method} {path}: the method is not served here"), request_id
    )
    response.status_code = status
    response.headers.update(headers)
    return response
