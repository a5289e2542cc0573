"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self

import grpc

from .answer import Resumption, whole_of
from .errors import CancelledError
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
from .retry import Caller


class AsyncClient(Caller):
    """asyncio client; behaves like `Client`, on the event loop that created it."""

    _grpc = grpc.aio

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse]:
        """Stream the answer; see `Client.generate`.

        Closing the generator, or cancelling the task that reads it, cancels the request.
        """
        resumption = Resumption(request)
        attempts = self._attempts(timeout_s)
        while not resumption.is_complete:
            call = attempts.call(self._stub.Generate, resumption.request())
            failure: Exception | None = None
            try:
                async for response in call:
                    says_something = resumption.accept(response)
                    if response.choices:
                        attempts.progress()
                    if says_something:
                        yield response
            except grpc.RpcError as error:
                failure = error
            except asyncio.CancelledError:
                # gRPC raises this also when the client was closed, not only when this task was
                # cancelled.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise CancelledError("the client was closed") from None
            finally:
                call.cancel()
            if not resumption.is_complete:
                delay_s = attempts.delay_after(failure, is_started=resumption.is_started)
                await asyncio.sleep(delay_s)

    async def complete(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> GenerateResponse:
        """Wait for the whole answer; see `Client.complete`."""
        return whole_of([each async for each in self.generate(request, timeout_s=timeout_s)])

    async def list_models(self, *, timeout_s: float | None = None) -> ListModelsResponse:
        """See `Client.list_models`."""
        return await self._call(self._stub.ListModels, ListModelsRequest(), timeout_s)

    async def tokenize(
        self, request: TokenizeRequest, *, timeout_s: float | None = None
    ) -> TokenizeResponse:
        """See `Client.tokenize`."""
        return await self._call(self._stub.Tokenize, request, timeout_s)

    async def detokenize(
        self, request: DetokenizeRequest, *, timeout_s: float | None = None
    ) -> DetokenizeResponse:
        """See `Client.detokenize`."""
        return await self._call(self._stub.Detokenize, request, timeout_s)

    async def _call(self, start: Any, request: Any, timeout_s: float | None) -> Any:
        """Make a call with one answer, and repeat it where that may help."""
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return await attempts.call(start, request)
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(failure)
            await asyncio.sleep(delay_s)

    async def close(self) -> None:
        """Close the connection; streams in progress end with an error."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
