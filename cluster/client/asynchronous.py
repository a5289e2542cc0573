"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

import grpc

from .answer import Collector, Resumption
from .endpoint import Endpoint
from .errors import ClientError, UnavailableError, error_of
from .generated.generation_pb2 import (
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from .generated.generation_pb2_grpc import GenerationServiceStub
from .retry import Deadline, Retries


class AsyncClient:
    """asyncio client; behaves like `Client`, on the event loop that created it."""

    def __init__(self, endpoint: str | Endpoint, *, max_retries: int = 5) -> None:
        """Arguments as for `Client`."""
        where = endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
        credentials = where.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(where.address, where.options())
        else:
            self._channel = grpc.aio.secure_channel(where.address, credentials, where.options())
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._endpoint = where
        self._max_retries = max_retries

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse]:
        """Stream the answer; see `Client.generate`.

        Closing the generator, or cancelling the task that reads it, cancels the request.
        """
        resumption, retries = Resumption(request), Retries(self._max_retries)
        deadline = Deadline(timeout_s)
        while not resumption.is_complete:
            call = self._stub.Generate(
                resumption.request(),
                timeout=deadline.remaining_s(),
                metadata=tuple(self._endpoint.metadata),
            )
            cause: Exception | None = None
            try:
                async for response in call:
                    says_something = resumption.accept(response)
                    if response.choices:
                        retries.progress()
                    if says_something:
                        yield response
                error: ClientError = UnavailableError("the stream ended before its last response")
            except grpc.RpcError as failure:
                error, cause = error_of(failure, self._endpoint.address), failure
            finally:
                call.cancel()
            if not resumption.is_complete:
                try:
                    delay_s = retries.delay_after(error, is_started=resumption.is_started)
                    deadline.checked(delay_s, error)
                except ClientError as final:
                    raise final from cause
                await asyncio.sleep(delay_s)

    async def complete(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> GenerateResponse:
        """Wait for the whole answer; see `Client.complete`."""
        collector = Collector()
        async for response in self.generate(request, timeout_s=timeout_s):
            collector.add(response)
        return collector.answer()

    async def list_models(self, *, timeout_s: float | None = None) -> ListModelsResponse:
        """See `Client.list_models`."""
        answer: ListModelsResponse = await self._call(
            self._stub.ListModels, ListModelsRequest(), timeout_s
        )
        return answer

    async def tokenize(
        self, request: TokenizeRequest, *, timeout_s: float | None = None
    ) -> TokenizeResponse:
        """See `Client.tokenize`."""
        answer: TokenizeResponse = await self._call(self._stub.Tokenize, request, timeout_s)
        return answer

    async def detokenize(
        self, request: DetokenizeRequest, *, timeout_s: float | None = None
    ) -> DetokenizeResponse:
        """See `Client.detokenize`."""
        answer: DetokenizeResponse = await self._call(self._stub.Detokenize, request, timeout_s)
        return answer

    async def _call(self, start: Any, request: Any, timeout_s: float | None) -> Any:
        """Make a call with one answer, and repeat it where that may help."""
        retries, deadline = Retries(self._max_retries), Deadline(timeout_s)
        metadata = tuple(self._endpoint.metadata)
        while True:
            try:
                return await start(request, timeout=deadline.remaining_s(), metadata=metadata)
            except grpc.RpcError as failure:
                error = error_of(failure, self._endpoint.address)
                delay_s = deadline.checked(retries.delay_after(error), error)
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Close the connection; streams in progress end with an error."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
