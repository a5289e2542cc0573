"""The endpoints that generate nothing: the front page, models, versions, health, the tokenizer; and
the OpenAPI document of all endpoints, from the models that the parsers read."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import yaml
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from cluster.errors import ERRORS, ForbiddenError, UnauthenticatedError
from cluster.records import frozen, record
from cluster.requests.idle import MEANINGS
from deployments.ingress.api.contract import Body
from deployments.ingress.api.messages import AnthropicMessages, Counted
from deployments.ingress.api.response_request import Response as ResponseBody
from deployments.ingress.api.writer import STATISTICS_PATH, statistics_schema, times_schema
from deployments.ingress.body import read_object
from deployments.ingress.ingress import Ingress
from deployments.ingress.keys import KeyRing
from deployments.ingress.metrics_page import seen_by
from deployments.ingress.openai_request import (
    Chat,
    CompletionBody,
    Detokenize,
    Tokenize,
)
from deployments.ingress.spec import Limits
from deployments.ingress.wording import JsonObject, Rule, Status, resolved, warning_header
from deployments.page.routes import Handler, wants_html
from deployments.report import rendered

_VERSION = importlib.metadata.version("drafthouse")
_DOCUMENT, _PAGES = yaml.safe_load_all(Path(__file__).with_name("openapi.yaml").read_text("utf-8"))


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
# The bodies of POST endpoints.
ENDPOINTS: Sequence[type[Body]] = (
    CompletionBody,
    Chat,
    ResponseBody,
    AnthropicMessages,
    Counted,
    Tokenize,
    Detokenize,
)
_STATISTICS = "SpeculativeDecoding"


@record
class Pages:
    """Answers GET requests, and those about tokens.

    created: when the model was created, as clients see it; seconds since 1970."""

    _ingress: Ingress
    _created: int
    _keys: KeyRing

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Every method and path with its handler."""
        return [
            # An adapter's name may have slashes.
            *(
                (
                    page.method,
                    page.path.replace("{model}", "{model:path}"),
                    getattr(self, page.handler),
                )
                for page in PAGES
            ),
            ("POST", Tokenize.path, self.tokenize),
            ("POST", Detokenize.path, self.detokenize),
            ("POST", Counted.path, self.count_tokens),
        ]

    async def front(self, request: Request) -> Response:
        """As HTML for who asks for that by name, as browsers do; as text for all others."""
        is_html = wants_html(request.headers.get("accept", ""))
        body = rendered(
            "ingress/api/front_page",
            {
                "is_html": is_html,
                "version": _VERSION,
                "names": self._ingress.limits().model_names,
                "posts": ENDPOINTS,
                # Those that can be opened as they are.
                "gets": [
                    page.path
                    for page in PAGES
                    if page.method == "get"
                    and "{" not in page.path
                    and page.path not in ("/", "/docs")
                ],
            },
        )
        kind = HTMLResponse if is_html else PlainTextResponse
        return kind(body, headers={"Vary": "Accept"})

    async def about(self, request: Request) -> Response:
        """Tells the page whom it talks to."""
        config = self._ingress.config
        return JSONResponse(
            {
                "version": _VERSION,
                "model": config.model_name,
                "models": self._ingress.limits().model_names,
                "drafters": {name: config.drafters[name].kind for name in config.on_their_own},
                "tasks": config.tasks,
                "max_model_len": self._max_model_len(),
                "idle_because": dict(MEANINGS),
            }
        )

    async def models(self, request: Request) -> Response:
        names = self._ingress.limits().model_names
        return JSONResponse({"object": "list", "data": list(map(self._card, names))})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._ingress.limits().check_model(name)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> JsonObject:
        """Of the model, or of an adapter, whose parent the model is."""
        own = self._ingress.config.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "drafthouse",
            "root": own,
            "parent": own if name in self._ingress.limits().adapters else None,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        return self._ingress.coordinators.max_context_len or None

    async def response(self, request: Request) -> Response:
        store, response_id = self._ingress.limits().store, request.path_params["response_id"]
        found = store.get(response_id, request.state.caller.name, "response_id")
        return JSONResponse(found.body)

    async def forget_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._ingress.limits().store.drop(response_id, request.state.caller.name, "response_id")
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": _VERSION})

    async def ping(self, request: Request) -> Response:
        """For load balancers: says that this process answers, and nothing of the others."""
        return Response(status_code=200)

    async def healthz(self, request: Request) -> Response:
        """As Ray Serve's proxies answer, whom KubeRay asks which pods its Service leads to."""
        return PlainTextResponse("success")

    async def health(self, request: Request) -> Response:
        """All of it for operators; for everybody else whether it serves, and on loopback all but
        the names of keys."""
        state = await self._ingress.health()
        try:
            self._keys.check_operator(request.headers)
            if self._keys.owner(request.headers) is not None:
                state.pop("keys")
        except (UnauthenticatedError, ForbiddenError):
            state = {"status": state["status"]}
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """All of it for operators; for whoever has another key that key's own series."""
        owner = self._keys.owner(request.headers)
        if not owner:
            self._keys.check_operator(request.headers)
        page = await self._ingress.render_metrics()
        if owner is not None:
            page = seen_by(owner, page, is_general=self._keys.all_operate)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def stats(self, request: Request) -> Response:
        self._keys.check_operator(request.headers)
        return JSONResponse(await self._ingress.stats())

    async def events(self, request: Request) -> Response:
        """How targets and drafters do, to operators: it never ends by itself."""
        self._keys.check_operator(request.headers)
        return self._ingress.watchers.stream()

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._ingress.limits()))

    async def tokenize(self, request: Request) -> Response:
        """vLLM's /tokenize: the tokens of a text, or of a conversation."""
        ingress = self._ingress
        asked = await read_object(request, ingress.limits(), Tokenize.read)
        token_ids = await ingress.tokenize(
            asked.prompt_of(), add_special_tokens=asked.add_special_tokens
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

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's: how many tokens /v1/messages would read."""
        asked = await read_object(request, self._ingress.limits(), Counted.read)
        count = len(await self._ingress.tokenize(asked.prompt_of()))
        return JSONResponse({"input_tokens": count}, headers=warning_header(asked.ignored))

    async def detokenize(self, request: Request) -> Response:
        """vLLM's /detokenize: the text of tokens, special ones included."""
        asked = await read_object(request, self._ingress.limits(), Detokenize.read)
        text = await self._ingress.detokenize(asked.tokens)
        return JSONResponse({"prompt": text}, headers=warning_header(asked.ignored))


def openapi(limits: Limits) -> JsonObject:
    """The document, for one served model and its limits."""
    document: JsonObject = copy.deepcopy(_DOCUMENT)
    document["info"]["version"] = _VERSION
    schemas, paths = document["components"]["schemas"], document["paths"]
    schemas[_STATISTICS] = statistics_schema()
    error = schemas["Error"]["properties"]["error"]["properties"]
    error["code"]["enum"] = sorted(one.code for one in ERRORS)
    for page in PAGES:
        paths.setdefault(page.path, {})[page.method] = _page(page)
    for body in ENDPOINTS:
        paths[body.path] = {"post": _endpoint(body, limits)}
    return document


def _page(page: GetEndpoint) -> JsonObject:
    names = [part[1:-1] for part in page.path.split("/") if part.startswith("{")]
    answer: JsonObject = {"description": page.summary}
    if page.media_type:
        answer["content"] = {page.media_type: {}}
    answers = dict.fromkeys(page.statuses, answer) | {"default": _error("Error")}
    found: JsonObject = {"summary": page.summary, "responses": answers}
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return found


def _endpoint(body: type[Body], limits: Limits) -> JsonObject:
    answer: JsonObject = {"type": "object"}
    content: JsonObject = {"application/json": {"schema": answer}}
    if "stream" in body.rules():  # it generates
        outer, inner = STATISTICS_PATH.split(".")
        told = {**times_schema(), inner: {"$ref": f"#/components/schemas/{_STATISTICS}"}}
        answer["properties"] = {outer: {"type": "object", "properties": told}}
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = body_schema(body, limits)
    return {
        "summary": body.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": _error("MessagesError" if issubclass(body, Counted) else "Error"),
        },
    }


def _error(name: str) -> JsonObject:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "why not", "content": {"application/json": {"schema": schema}}}


def body_schema(body: type[Body], limits: Limits) -> JsonObject:
    """JSON Schema of a body."""
    rules = body.rules()
    schema: JsonObject = {
        "type": "object",
        "properties": {name: _field(rule, limits) for name, rule in rules.items()},
        # Unknown fields of messages are refused too, unless they are empty.
        "additionalProperties": limits.is_lenient or body.is_listed,
    }
    required = [name for name, rule in rules.items() if rule.is_required]
    return schema | ({"required": required} if required else {})


def _field(rule: Rule, limits: Limits) -> JsonObject:
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
