"""The endpoints that generate nothing: the front page, models, versions, health, the tokenizer."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from cluster.coordinator.idle import MEANINGS
from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.records import record
from deployments.ingress.api.contract import Body
from deployments.ingress.api.messages import COUNT_TOKENS, Counted
from deployments.ingress.api.openapi import ENDPOINTS, PAGES, openapi
from deployments.ingress.body import read_object
from deployments.ingress.ingress import Ingress
from deployments.ingress.keys import Operators
from deployments.ingress.metrics_page import seen_by
from deployments.ingress.openai_request import DETOKENIZE, TOKENIZE, Detokenize, Tokenize
from deployments.ingress.sampling import check_model
from deployments.ingress.wording import warning_header
from deployments.page.routes import wants_html
from deployments.report import rendered

Handler = Callable[[Request], Awaitable[Response]]
Asked = TypeVar("Asked", bound=Body)

_VERSION = importlib.metadata.version("drafthouse")


@record
class Pages:
    """Answers GET requests, and those about tokens.

    created: when the model was created, as clients see it; seconds since 1970."""

    _ingress: Ingress
    _created: int
    _operators: Operators

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Every method and path with its handler."""
        return [
            # An adapter's name may have slashes.
            *(
                (
                    page.method.upper(),
                    page.path.replace("{model}", "{model:path}"),
                    getattr(self, page.handler),
                )
                for page in PAGES
            ),
            ("POST", TOKENIZE.path, self.tokenize),
            ("POST", DETOKENIZE.path, self.detokenize),
            ("POST", COUNT_TOKENS.path, self.count_tokens),
        ]

    async def front(self, request: Request) -> Response:
        """As HTML for who asks for that by name, as browsers do; as text for all others."""
        is_html = wants_html(request.headers.get("accept", ""))
        body = rendered(
            "ingress/api/front_page",
            {
                "is_html": is_html,
                "version": _VERSION,
                "names": self._ingress.limits.model_names,
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
                "models": self._ingress.limits.model_names,
                "drafters": {name: config.drafters[name].kind for name in config.on_their_own},
                "tasks": config.tasks,
                "max_model_len": self._max_model_len(),
                "idle_because": dict(MEANINGS),
            }
        )

    async def models(self, request: Request) -> Response:
        cards = list(map(self._card, self._ingress.limits.model_names))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        check_model(name, self._ingress.limits)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        """Of the model, or of an adapter, whose parent the model is."""
        own = self._ingress.config.model_name
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "drafthouse",
            "root": own,
            "parent": own if name in self._ingress.limits.adapters else None,
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int | None:
        return self._ingress.coordinators.max_context_len or None

    async def response(self, request: Request) -> Response:
        store, response_id = self._ingress.limits.store, request.path_params["response_id"]
        found = store.get(response_id, request.state.caller.name, "response_id")
        return JSONResponse(found.body)

    async def forget_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._ingress.limits.store.drop(response_id, request.state.caller.name, "response_id")
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
            self._operators.check(request)
            if self._operators.owner(request) is not None:
                state.pop("keys")
        except (UnauthenticatedError, ForbiddenError):
            state = {"status": state["status"]}
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        """All of it for operators; for whoever has another key that key's own series."""
        operators = self._operators
        owner = operators.owner(request)
        if not owner:
            operators.check(request)
        page = await self._ingress.render_metrics()
        if owner is not None:
            page = seen_by(owner, page, is_general=operators.is_everybody)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def stats(self, request: Request) -> Response:
        self._operators.check(request)
        return JSONResponse(await self._ingress.stats())

    async def events(self, request: Request) -> Response:
        """How targets and drafters do, to operators: it never ends by itself."""
        self._operators.check(request)
        return self._ingress.watchers.stream()

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self._ingress.limits, _VERSION))

    async def tokenize(self, request: Request) -> Response:
        """vLLM's /tokenize: the tokens of a text, or of a conversation."""
        ingress = self._ingress
        asked = await self._read(request, Tokenize)
        prompt, _ = asked.prompt_of(ingress.limits)
        token_ids = await ingress.tokenize(prompt, add_special_tokens=asked.add_special_tokens)
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
        asked = await self._read(request, Counted)
        prompt, _ = asked.prompt_of(self._ingress.limits)
        count = len(await self._ingress.tokenize(prompt))
        return JSONResponse({"input_tokens": count}, headers=warning_header(asked.ignored))

    async def detokenize(self, request: Request) -> Response:
        """vLLM's /detokenize: the text of tokens, special ones included."""
        asked = await self._read(request, Detokenize)
        return JSONResponse({"prompt": await self._ingress.detokenize(asked.tokens)})

    async def _read(self, request: Request, body: type[Asked]) -> Asked:
        ingress = self._ingress
        return await read_object(
            request, ingress.config.ingress, lambda values: body.read(values, ingress.limits)
        )
