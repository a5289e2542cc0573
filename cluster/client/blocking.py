"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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
from .retry import Attempts, Caller


class Client(Caller):
    """Blocking client; safe to use from several threads."""

    _grpc = grpc

    def generate(self, request: GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """Stream the answer; the last response carries usage and statistics.

        A stream that breaks is resumed after the last received token, on another server if need be.
        timeout_s: limit for the whole answer.  The stream raises ClientErrors.
        """
        attempts = self._attempts(timeout_s)
        return Stream(self._stub.Generate, Resumption(request), attempts)

    def complete(
        self, request: GenerateRequest, *, timeout_s: float | None = None
    ) -> GenerateResponse:
        """Wait for the whole answer: one response that has all of it.  Errors as in `generate`."""
        return whole_of(self.generate(request, timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float | None = None) -> ListModelsResponse:
        """The names that requests may give as their model.  Errors as in `generate`."""
        return self._call(self._stub.ListModels, ListModelsRequest(), timeout_s)

    def tokenize(
        self, request: TokenizeRequest, *, timeout_s: float | None = None
    ) -> TokenizeResponse:
        """The tokens of a text or of a conversation."""
        return self._call(self._stub.Tokenize, request, timeout_s)

    def detokenize(
        self, request: DetokenizeRequest, *, timeout_s: float | None = None
    ) -> DetokenizeResponse:
        """The text of tokens."""
        return self._call(self._stub.Detokenize, request, timeout_s)

    def _call(self, start: Any, request: Any, timeout_s: float | None) -> Any:
        """Make a call with one answer, and repeat it where that may help."""
        attempts = self._attempts(timeout_s)
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
        self._cancelled = threading.Event()
        self._calls: list[Any] = []  # the last one
        # Without a way back to this object: when a loop that is left by `break` drops it, which is
        # all that Python tells us, the generator ends, and with it the call.
        self._responses = _responses(start, resumption, attempts, self._cancelled, self._calls)

    def __next__(self) -> GenerateResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """End the request, from any thread; a read that waits raises CancelledError."""
        self._cancelled.set()
        for call in self._calls:
            call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def _responses(
    start: Any,
    resumption: Resumption,
    attempts: Attempts,
    cancelled: threading.Event,
    calls: list[Any],
) -> Iterator[GenerateResponse]:
    """calls: is given the one in progress."""
    while not resumption.is_complete:
        if cancelled.is_set():
            raise CancelledError("the stream was cancelled")
        calls[:] = [call := attempts.call(start, resumption.request())]
        if cancelled.is_set():  # while the call was made
            call.cancel()
        failure: Exception | None = None
        try:
            for response in call:
                says_something = resumption.accept(response)
                if response.choices:
                    attempts.progress()
                if resumption.is_complete:
                    call.cancel()  # nothing but the status is left, which frees the call
                if says_something:
                    yield response
        except grpc.RpcError as error:
            failure = error
        finally:
            call.cancel()
        if not resumption.is_complete and not cancelled.is_set():
            delay_s = attempts.delay_after(failure, is_started=resumption.is_started)
            cancelled.wait(delay_s)
