"""An OpenAI-compatible server whose prompts say when each piece of their answer comes.

A prompt is "FIRST_MS GAP_MS PIECES TOKENS": its first piece comes after FIRST_MS, each other one
GAP_MS after the one before, and each counts as TOKENS tokens; for 0 the server counts nothing.  In
a test it is a transport in virtual time; real clients have
`python -m tests.support.deployments.scripted_server PORT`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from tests.support.deployments.api import Json

PROMPT_TOKENS = 4
MODELS = {"data": [{"id": "scripted", "root": "scripted", "owned_by": "a test"}]}
T = TypeVar("T")


@dataclass
class ScriptedServer(httpx.AsyncBaseTransport):
    """bodies: all that was asked.  is_ours: it says that it is a Drafthouse.  refusing: prompts
    that are refused."""

    is_ours: bool = False
    refusing: tuple[str, ...] = ()
    metrics: str = ""
    bodies: list[Json] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            owner = "drafthouse" if self.is_ours else "a test"
            return httpx.Response(200, json={"data": [{**MODELS["data"][0], "owned_by": owner}]})
        if request.url.path == "/metrics":
            return httpx.Response(200 if self.metrics else 404, text=self.metrics)
        body = json.loads(request.content)
        self.bodies.append(body)
        if prompt_of(body) in self.refusing:
            return httpx.Response(400, json={"error": {"message": "not this one"}})
        return httpx.Response(200, stream=_Stream(pieces(body)))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk


def prompt_of(body: Json) -> str:
    """The text of a request; a chat's content may be a list of parts."""
    content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return str(content if isinstance(content, str) else content[0]["text"])


async def pieces(body: Json) -> AsyncIterator[bytes]:
    """The events of an answer at their times, counted from the first look at them."""
    clock = asyncio.get_running_loop().time
    began = clock()
    first_ms, gap_ms, count, tokens = map(float, prompt_of(body).split())
    is_chat = "messages" in body
    if is_chat:
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for index in range(int(count)):
        due = began + (first_ms + index * gap_ms) / 1e3
        await asyncio.sleep(due - clock())
        said = {"delta": {"content": " a"}} if is_chat else {"text": " a"}
        reason = "length" if index == count - 1 else None
        yield _event({"choices": [{"index": 0, **said, "finish_reason": reason}]})
    if not count:
        await asyncio.sleep(first_ms / 1e3)
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if tokens:
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": int(count * tokens)}
        yield _event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _event(data: Json) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next thing that is due, once nothing else is to do."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` where only sleeping takes time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def _application() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(pieces(await request.json()), media_type="text/event-stream")

    async def models(request: Request) -> JSONResponse:
        return JSONResponse(MODELS)

    asked = [
        Route(f"/v1/{each}", answer, methods=["POST"])
        for each in ("chat/completions", "completions")
    ]
    return Starlette(routes=[Route("/v1/models", models), *asked])


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(_application(), port=int(sys.argv[1]), log_level="warning")
