"""Asks an OpenAI-compatible server, ours or another's, and reads its streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from cluster.errors import WorkerError

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def said(choice: Mapping[str, Any]) -> str:
    """The text that one choice of an event adds to the answer."""
    return str(choice.get("delta", {}).get("content") or choice.get("text") or "")


def choices(event: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The choices of an event; none in the one that only counts tokens."""
    return event.get("choices") or ()


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
