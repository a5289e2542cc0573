"""Asks an OpenAI-compatible server, ours or another's, and reads its streams."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from cluster.errors import WorkerError
from cluster.records import frozen

_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# `owned_by` of our own models in /v1/models.
_OURS = "drafthouse"
_NO_SUCH_PATH = (404, 405)
_WANTS_A_KEY = (401, 403)


class RefusedError(WorkerError):
    """The server refuses the request, with this HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OpenAIServer:
    """One server, for the time of an `async with` block.

    transport: carries the requests, None = the network.  keeps_connections: False for servers that
    end a connection behind an answer without saying so, as llama.cpp's does.
    """

    def __init__(
        self,
        url: str,
        api_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        keeps_connections: bool = True,
    ) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=self.base,
            timeout=_TIMEOUT,
            transport=transport,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_keepalive_connections=None if keeps_connections else 0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> tuple[str, bool]:
        """The name of its first model, and True if the server is a Drafthouse.

        Raises WorkerError where nothing answers, or something that is no such server.
        """
        try:
            reply = await self._client.get("/v1/models")
            if reply.is_error and reply.status_code not in _NO_SUCH_PATH:
                raise _refusal(reply, self.base)
            reply.raise_for_status()
            first = reply.json()["data"][0]
            return str(first["id"]), first.get("owned_by") == _OURS
        except httpx.ConnectError as error:
            raise WorkerError(
                f"nothing answers at {self.base}; start a server with `drafthouse serve`, or name "
                "the address of one"
            ) from error
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise WorkerError(
                f"{self.base}/v1/models does not list a model ({error}); is this an "
                "OpenAI-compatible server?"
            ) from error

    async def metrics(self) -> str | None:
        """The page for Prometheus, None where the server has none.

        Raises RefusedError where it is not for who has no key.
        """
        try:
            reply = await self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        if reply.status_code in _WANTS_A_KEY:
            raise _refusal(reply, self.base)
        return reply.text if reply.status_code == 200 else None

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one streamed answer, each as it comes: of a chat if `body` has messages.

        Raises RefusedError for a refusal, WorkerError for an answer that breaks off.
        """
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        try:
            async with self._client.stream("POST", path, json={**body, "stream": True}) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    raise _refusal(reply, self.base)
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            raise WorkerError(f"{self.base}: {_message(event['error'])}")
                        yield event
        except (httpx.HTTPError, ValueError) as error:
            raise WorkerError(f"{self.base} broke off its answer ({error})") from error


@frozen
class Token:
    """One token's bytes, and the drafters that had proposed it; none: it is the target's own."""

    data: bytes
    drafters: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """The drafter for which it counts, "" for the target."""
        return self.drafters[0] if self.drafters else ""


@frozen
class AnswerPiece:
    """What one choice of an event adds to the answer; thought: the reasoning before it."""

    text: str
    thought: str
    tokens: tuple[Token, ...]


@dataclass(slots=True)
class StreamedAnswer:
    """One answer, as far as it has come.

    asked_s, times: of the question and of each piece, which may be several tokens, by the clock.
    tokens, statistics: with their drafters, and of speculation, where a server of ours is asked for
    `return_draft_sources`.
    """

    clock: Callable[[], float]
    asked_s: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    tokens: list[Token] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked_s = self.clock()

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.asked_s

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return self.times[-1] - self.asked_s

    @property
    def num_tokens(self) -> int:
        """As the server counts them, else as they were seen."""
        counted = self.usage.get("completion_tokens")
        return int(counted) if counted is not None else len(self.tokens) or len(self.times)

    @property
    def by_drafter(self) -> Counter[str]:
        """How many tokens count for each drafter."""
        return Counter(token.owner for token in self.tokens if token.owner)

    def take(self, event: Mapping[str, Any]) -> list[AnswerPiece]:
        """Add an event; returns its pieces."""
        self.usage = event.get("usage") or self.usage
        metrics = event.get("metrics") or {}
        self.statistics = metrics.get("speculative_decoding") or self.statistics
        pieces = []
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece = _piece(choice)
            if piece is not None:
                self.times.append(self.clock())
                self.text += piece.text
                self.tokens += piece.tokens
                pieces.append(piece)
        return pieces


def _piece(choice: Mapping[str, Any]) -> AnswerPiece | None:
    """None for what names the speaker of a chat, which may come before any token, or says no more
    than that the chat ends."""
    is_chat, sources = choice.get("delta") is not None, choice.get("draft_sources") or ()
    delta = choice.get("delta") or {}
    told = [value for name, value in delta.items() if name != "role"]
    if is_chat and not sources and not (any(told) if "role" in delta else told):
        return None
    return AnswerPiece(
        str(delta.get("content") or choice.get("text") or ""),
        str(delta.get("reasoning_content") or ""),
        tuple(Token(bytes(each["bytes"]), tuple(each["drafters"])) for each in sources),
    )


def _refusal(reply: httpx.Response, base: str) -> RefusedError:
    try:
        message = _message(reply.json()["error"])
    except (ValueError, LookupError, TypeError):
        message = reply.text[:200]
    status = reply.status_code
    told = f"{base} refuses the question (HTTP status {status}): {message}"
    if status in _WANTS_A_KEY:
        told += "; give a key that it knows by --api-key"
    return RefusedError(told, status)


def _message(error: Any) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)
