"""Continuations by another engine, over HTTP as OpenAI's `/v1/completions` streams them.

They come from a server that nobody here vouches for: only the address that the operator wrote is
asked, redirects and proxies are not followed, time and bytes are bounded, and nothing of a text or
of an answer is logged.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx

# A token's event has some hundred bytes, and the last one thousands.
_BYTES_PER_TOKEN = 4096
_LEAST_BYTES = 65_536
_MAX_LINE_BYTES = 16_384
# Bytes of text; a longer draft, of an engine that does not keep to max_tokens, would take too long
# to encode.
TEXT_PER_TOKEN = 16
# What engines write for bytes that are no character, and half characters of JSON's escapes.
_BROKEN = re.compile("[\ufffd\ud800-\udfff]")
# This text cannot be continued; others may.
_REFUSALS = frozenset((400, 413, 422))


class End(Enum):
    """STOPPED: the engine says that the text ends here.  CUT: it was asked for no more.  REFUSED:
    it does not continue this text.  FAILED: it gave no sound answer."""

    STOPPED = auto()
    CUT = auto()
    REFUSED = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer ended.  why: of a refusal or a failure, without a word of the engine's."""

    end: End
    why: str = ""


class _RubbishError(ValueError):
    """What came is no answer; the message quotes nothing of it."""


class Answer:
    """One continuation as it comes.  The event loop writes it, the thread that asked reads it."""

    def __init__(self) -> None:
        self.length = 0  # bytes so far
        self.receiving: Future[Verdict] = Future()
        self._pieces: deque[bytes] = deque()

    @property
    def verdict(self) -> Verdict | None:
        """None while more may come.  What was there when it ended is there for `take`."""
        if not self.receiving.done():
            return None
        try:
            return self.receiving.result()
        except CancelledError:
            return Verdict(End.FAILED, "it was given up")
        except Exception as error:  # noqa: BLE001 - a defect of ours or of a library's
            return Verdict(End.FAILED, type(error).__name__)

    def take(self) -> bytes:
        """Return what has come since the last call."""
        return b"".join([self._pieces.popleft() for _ in range(len(self._pieces))])

    def put(self, text: str, max_bytes: int) -> bool:
        """Add text as far as it can be used; False where that is its end."""
        sound = _BROKEN.split(text, maxsplit=1)[0]
        piece = sound.encode()[: max_bytes - self.length]
        self.length += len(piece)
        self._pieces.append(piece)
        return sound == text and self.length < max_bytes

    def give_up(self) -> None:
        """End it: the connection is closed, by which engines notice."""
        self.receiving.cancel()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine is asked, and for how much.  url: of its completions."""

    url: str
    model: str = ""
    api_key: str = ""
    max_tokens: int = 32
    timeout_s: float = 10.0


class Completions:
    """Asks one engine, on an event loop in a thread of its own.

    The thread is there while answers are wanted: from the first `ask` until `rest`.  tell: called
    in it whenever something has come.
    """

    def __init__(self, endpoint: Endpoint, tell: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._tell = tell
        self._max_bytes = _LEAST_BYTES + _BYTES_PER_TOKEN * endpoint.max_tokens
        self._max_text = TEXT_PER_TOKEN * endpoint.max_tokens
        # It takes tens of milliseconds, so it is made once.
        self._certificates = httpx.create_ssl_context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    def ask(self, prompt: str) -> Answer:
        """Ask how a text goes on; returns at once."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._client = self._new_client()
            arguments = (self._loop, self._client)
            threading.Thread(
                target=_run, args=arguments, name="draft-requests", daemon=True
            ).start()
        assert self._client is not None
        answer = Answer()
        receiving = self._receive(self._client, prompt, answer)
        answer.receiving = asyncio.run_coroutine_threadsafe(receiving, self._loop)
        answer.receiving.add_done_callback(lambda _: self._tell())
        return answer

    def rest(self) -> None:
        """Give up all answers and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = self._client = None

    def _new_client(self) -> httpx.AsyncClient:
        endpoint = self._endpoint
        headers = {"Accept-Encoding": "identity", "User-Agent": "drafthouse"}
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        return httpx.AsyncClient(
            headers=headers,
            verify=self._certificates,
            trust_env=False,  # proxies of the environment
            follow_redirects=False,
            timeout=None,  # the whole answer has a time
            # llama.cpp's server ends connections without saying so.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def _receive(self, client: httpx.AsyncClient, prompt: str, answer: Answer) -> Verdict:
        endpoint = self._endpoint
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": endpoint.max_tokens, "temperature": 0, "stream": True,
        }  # fmt: skip
        if endpoint.model:
            body["model"] = endpoint.model
        try:
            async with (
                asyncio.timeout(endpoint.timeout_s),
                client.stream("POST", endpoint.url, json=body) as reply,
            ):
                if reply.status_code != 200:
                    end = End.REFUSED if reply.status_code in _REFUSALS else End.FAILED
                    return Verdict(end, f"HTTP status {reply.status_code}")
                return Verdict(await self._read(reply, answer))
        except TimeoutError:
            return Verdict(End.FAILED, f"no whole answer within {endpoint.timeout_s:g} s")
        except _RubbishError as error:
            return Verdict(End.FAILED, str(error))
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            return Verdict(End.FAILED, type(error).__name__)

    async def _read(self, reply: httpx.Response, answer: Answer) -> End:
        num_bytes, begun = 0, b""
        async for chunk in reply.aiter_raw():
            num_bytes += len(chunk)
            *lines, begun = (begun + chunk).split(b"\n")
            if num_bytes > self._max_bytes or len(begun) > _MAX_LINE_BYTES:
                raise _RubbishError("its answer is too long")
            for line in lines:
                end = self._take(line, answer)
                if end is not None:
                    return end
            self._tell()
        raise _RubbishError("its answer breaks off")

    def _take(self, line: bytes, answer: Answer) -> End | None:
        """Take in one line of the stream; returns the end that it tells of."""
        if not line.startswith(b"data:"):
            return None
        data = line[5:].strip()
        if data == b"[DONE]":
            return End.CUT
        try:
            choices = json.loads(data)["choices"]
            text, reason = (choices[0]["text"], choices[0].get("finish_reason")) if choices else (
                "", None
            )  # fmt: skip
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _RubbishError("its answer is no completion") from error
        if not isinstance(text, str):
            raise _RubbishError("its answer is no completion")
        if not answer.put(text, self._max_text) or reason == "length":
            return End.CUT
        return End.STOPPED if reason == "stop" else None


def _run(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    """Run the loop until it is stopped, and end what is under way then."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(_end(client))
    finally:
        loop.close()


async def _end(client: httpx.AsyncClient) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
    await asyncio.get_running_loop().shutdown_asyncgens()
