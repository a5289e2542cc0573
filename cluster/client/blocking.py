"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import grpc

from .answer import Collector, Resumption
from .endpoint import Endpoint
from .errors import CancelledError, ClientError
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
from .retry import Attempts


class Client:
    """Blocking client; safe to use from several threads."""

    def __init__(self, endpoint: str | Endpoint, *, max_retries: int = 5) -> None:
        """endpoint: "host:port" for a plain connection; it is made when first used.

        max_retries: how many calls in a row may fail without a new token before the error is
        raised.
        """
        where = endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
        self._channel = where.channel(grpc)
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._endpoint = where
        self._max_retries = max_retries

    def generate(self, request: GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """Stream the answer; the last response carries usage and statistics.

        A stream that breaks is resumed after the last received token, on another server if need be.
        timeout_s: limit for the whole answer.  The stream raises ClientErrors.
        """
        attempts = Attempts(self._endpoint, self._max_retries, timeout_s)
        return Stream(self._stub.Generate, Resumption(request), attempts)

    def complete(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> GenerateResponse:
        """Wait for the whole answer: one response that has all of it.  Errors as in `generate`."""
        collector = Collector()
        for response in self.generate(request, timeout_s=timeout_s):
            collector.add(response)
        return collector.answer()

    def list_models(self, *, timeout_s: float | None = None) -> ListModelsResponse:
        """The names that requests may give as their model.  Errors as in `generate`."""
        answer: ListModelsResponse = self._call(
            self._stub.ListModels, ListModelsRequest(), timeout_s
        )
        return answer

    def tokenize(
        self, request: TokenizeRequest, *, timeout_s: float | None = None
    ) -> TokenizeResponse:
        """The tokens of a text or of a conversation."""
        answer: TokenizeResponse = self._call(self._stub.Tokenize, request, timeout_s)
        return answer

    def detokenize(
        self, request: DetokenizeRequest, *, timeout_s: float | None = None
    ) -> DetokenizeResponse:
        """The text of tokens."""
        answer: DetokenizeResponse = self._call(self._stub.Detokenize, request, timeout_s)
        return answer

    def _call(self, start: Any, request: Any, timeout_s: float | None) -> Any:
        """Make a call with one answer, and repeat it where that may help."""
        attempts = Attempts(self._endpoint, self._max_retries, timeout_s)
        while True:
            try:
                return attempts.call(start, request)
            except grpc.RpcError as failure:
                delay_s = attempts.delay_after(failure)
            time.sleep(delay_s)

    def close(self) -> None:
        """Close the connection; streams in progress end with an error."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(Iterator[GenerateResponse]):
    """The responses of one request, in order.  Leaving a `with` block around it cancels it."""

    def __init__(self, start: Any, resumption: Resumption, attempts: Attempts) -> None:
        """start: the method of the stub."""
        self._start = start
        self._resumption = resumption
        self._attempts = attempts
        self._call: Any = None
        self._cancelled = threading.Event()

    def __next__(self) -> GenerateResponse:
        while not self._resumption.is_complete:
            try:
                response: GenerateResponse = next(self._open())
            except StopIteration:
                self._wait(None)
            except grpc.RpcError as failure:
                self._wait(failure)
            else:
                if self._accept(response):
                    return response
        raise StopIteration

    def _open(self) -> Any:
        """The call in progress, or a new one."""
        if self._call is None:
            self._call = self._attempts.call(self._start, self._resumption.request())
        if self._cancelled.is_set():  # perhaps while the call was made
            self._call.cancel()
            raise CancelledError("the stream was cancelled")
        return self._call

    def _accept(self, response: GenerateResponse) -> bool:
        try:
            says_something = self._resumption.accept(response)
        except ClientError:
            self.cancel()
            raise
        if response.choices:
            self._attempts.progress()
        if self._resumption.is_complete:
            self._call.cancel()  # nothing but the status is left, which frees the call
        return says_something

    def _wait(self, failure: Exception | None) -> None:
        """Sleep before the next call; raises the error where there is none."""
        self._call = None
        if self._cancelled.is_set():
            raise CancelledError("the stream was cancelled") from failure
        is_started = self._resumption.is_started
        self._cancelled.wait(self._attempts.delay_after(failure, is_started=is_started))

    def cancel(self) -> None:
        """End the request, from any thread; a read that waits raises CancelledError."""
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A loop that is left by `break` drops its iterator, which is all that Python tells us.
        if getattr(self, "_call", None) is not None:
            self.cancel()
