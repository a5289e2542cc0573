"""The typed client of the public gRPC service, blocking and asyncio.

    with Client("127.0.0.1:9000") as client:
        request = GenerationRequest(model="drafthouse-demo", prompt="def main():")
        for response in client.generate(request):
            for choice in response.choices:
                print(choice.text, end="", flush=True)

A stream that breaks because a server went away is resumed after the last received token, on another
replica if necessary.  The seed is drawn here, so the text is the same as without the break.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from cluster.core import FinishReason, SpeculationStats, TokenArray, TokenLogprob
from cluster.errors import DrafthouseError, WorkerError
from cluster.rpc.codec_tokens import (
    decode_models,
    decode_tokens,
    encode_detokenize,
    encode_tokenize,
)
from cluster.rpc.generated import generation_pb2 as pb
from cluster.rpc.generation import (
    ChatMessage,
    ChoiceDelta,
    GenerationCall,
    GenerationRequest,
    GenerationResponse,
    Model,
    SamplingOptions,
    Usage,
)
from cluster.rpc.generation_channel import AsyncGenerationChannel, Endpoint, GenerationChannel

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Choice",
    "ChoiceDelta",
    "Client",
    "Endpoint",
    "Generation",
    "GenerationRequest",
    "GenerationResponse",
    "Model",
    "SamplingOptions",
    "Usage",
]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One complete generated text."""

    index: int
    text: str
    token_ids: TokenArray
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The complete answer to a request."""

    id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    speculative_decoding: SpeculationStats | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Client:
    """Blocking client; safe to use from several threads."""

    def __init__(self, endpoint: str | Endpoint, *, max_retries: int = 5) -> None:
        """endpoint: "host:port" for a plain connection.

        max_retries: how many streams in a row may break without a new token before the error is
        raised.
        """
        self._channel = GenerationChannel(_endpoint(endpoint))
        self._max_retries = max_retries

    def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generator[GenerationResponse]:
        """Stream the answer; the last response carries usage and statistics.

        timeout_s: limit for the whole answer.  Leaving the iteration cancels the request.  Raises
        RequestError, CapacityError, WorkerError (retries used up) and other DrafthouseErrors.
        """
        call = GenerationCall(request, self._max_retries)
        deadline = _Deadline(timeout_s)
        while not call.is_complete:
            try:
                stream = self._channel.generate(call.request(), deadline.remaining_s())
                with contextlib.closing(stream):
                    for response in stream:
                        yield call.accept(response)
                error: DrafthouseError = WorkerError("the stream ended before its last response")
            except DrafthouseError as raised:
                error = raised
            if not call.is_complete:
                time.sleep(deadline.checked(call.delay_after(error), error))

    def complete(self, request: GenerationRequest, *, timeout_s: float | None = None) -> Generation:
        """Wait for the whole answer; errors as in `generate`."""
        collector = _Collector()
        for response in self.generate(request, timeout_s=timeout_s):
            collector.add(response)
        return collector.generation()

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The names that requests may give as their model."""
        answer = self._channel.call("ListModels", pb.ListModelsRequest(), timeout_s)
        return decode_models(answer)

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> TokenArray:
        """Its token ids, int32[n].  add_special_tokens: whether a text gets the model's own."""
        asked = encode_tokenize(prompt, model, add_special_tokens=add_special_tokens)
        return decode_tokens(self._channel.call("Tokenize", asked, timeout_s))

    def detokenize(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """The text of tokens, special ones included."""
        asked = encode_detokenize(token_ids, model)
        return str((self._channel.call("Detokenize", asked, timeout_s)).text)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """asyncio client; behaves like `Client`, on one event loop."""

    def __init__(self, endpoint: str | Endpoint, *, max_retries: int = 5) -> None:
        """Arguments as for `Client`; create it on the event loop that uses it."""
        self._channel = AsyncGenerationChannel(_endpoint(endpoint))
        self._max_retries = max_retries

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerationResponse]:
        """Stream the answer; see `Client.generate`."""
        call = GenerationCall(request, self._max_retries)
        deadline = _Deadline(timeout_s)
        while not call.is_complete:
            try:
                stream = self._channel.generate(call.request(), deadline.remaining_s())
                async with contextlib.aclosing(stream):
                    async for response in stream:
                        yield call.accept(response)
                error: DrafthouseError = WorkerError("the stream ended before its last response")
            except DrafthouseError as raised:
                error = raised
            if not call.is_complete:
                await asyncio.sleep(deadline.checked(call.delay_after(error), error))

    async def complete(
        self, request: GenerationRequest, *, timeout_s: float | None = None
    ) -> Generation:
        """Wait for the whole answer; see `Client.complete`."""
        collector = _Collector()
        async for response in self.generate(request, timeout_s=timeout_s):
            collector.add(response)
        return collector.generation()

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The names that requests may give as their model."""
        answer = await self._channel.call("ListModels", pb.ListModelsRequest(), timeout_s)
        return decode_models(answer)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> TokenArray:
        """Its token ids, int32[n].  add_special_tokens: whether a text gets the model's own."""
        asked = encode_tokenize(prompt, model, add_special_tokens=add_special_tokens)
        return decode_tokens(await self._channel.call("Tokenize", asked, timeout_s))

    async def detokenize(
        self,
        token_ids: Sequence[int] | TokenArray,
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> str:
        """The text of tokens, special ones included."""
        asked = encode_detokenize(token_ids, model)
        return str((await self._channel.call("Detokenize", asked, timeout_s)).text)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _Deadline:
    """One time limit shared by several attempts."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def checked(self, delay_s: float, error: DrafthouseError) -> float:
        """Return `delay_s`; raise `error` if the deadline comes first."""
        remaining_s = self.remaining_s()
        if remaining_s is not None and remaining_s <= delay_s:
            raise error
        return delay_s


@dataclass(slots=True)
class _Parts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[TokenArray] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def choice(self, index: int) -> Choice:
        return Choice(
            index,
            "".join(self.texts),
            np.concatenate(self.token_ids),
            tuple(self.logprobs),
            self.finish_reason,
            self.stop,
        )


class _Collector:
    """Assembles a streamed answer."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._last: GenerationResponse | None = None

    def add(self, response: GenerationResponse) -> None:
        self._last = response
        for delta in response.choices:
            parts = self._parts.setdefault(delta.index, _Parts())
            parts.texts.append(delta.text)
            parts.token_ids.append(delta.token_ids)
            parts.logprobs.extend(delta.logprobs)
            parts.finish_reason = delta.finish_reason
            parts.stop = delta.stop

    def generation(self) -> Generation:
        last = self._last
        assert last is not None, "a complete answer has a last response"
        return Generation(
            last.id,
            last.model,
            last.seed,
            tuple(self._parts[index].choice(index) for index in sorted(self._parts)),
            last.usage or Usage(),
            last.speculative_decoding,
            last.prompt_logprobs,
        )


def _endpoint(endpoint: str | Endpoint) -> Endpoint:
    return endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
