"""Rules of calling again: after how long, and until when.  No waiting: the clients do that."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .endpoint import Endpoint
from .errors import BusyError, ClientError, DeadlineError, UnavailableError, error_of
from .generated.generation_pb2_grpc import GenerationServiceStub

_FIRST_DELAY_S = 0.1
# Longer than it takes to replace a replica; a server that needs more says so.
_MAX_DELAY_S = 5.0
# Clients that were refused together come back apart.
_JITTER = 0.25


class Caller:
    """What both clients have: the service, and how often it is called again."""

    _grpc: Any  # what makes the channel

    def __init__(self, endpoint: str | Endpoint, *, max_retries: int = 5) -> None:
        """endpoint: "host:port" for a plain connection; it is made when first used.

        max_retries: how many calls in a row may fail without a new token before the error is
        raised.
        """
        where = endpoint if isinstance(endpoint, Endpoint) else Endpoint(endpoint)
        self._channel = where.channel(self._grpc)
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._attempts = partial(Attempts, where, max_retries)


class Attempts:
    """The calls of one request, within one time limit; counts the failures in a row."""

    def __init__(
        self,
        endpoint: Endpoint,
        max_retries: int,
        timeout_s: float | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """max_retries: how many calls in a row may fail without progress; 0 = never call again.

        timeout_s: for all of them, from now; None = no limit.  jitter: uniform in [0, 1).
        """
        self._endpoint = endpoint
        self._max_retries = max_retries
        self._jitter = jitter
        self._ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._num_failures = 0

    def call(self, start: Any, request: Any) -> Any:
        """Call a method of the stub; raises DeadlineError when no time is left."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0.0:
            raise DeadlineError("the time that the call allowed is over; allow more by timeout_s")
        return start(
            request,
            timeout=left_s if left_s < math.inf else None,
            metadata=tuple(self._endpoint.metadata),
        )

    def progress(self) -> None:
        """Something new was received: failures before it count no more."""
        self._num_failures = 0

    def delay_after(self, failure: Any, *, is_started: bool = False) -> float:
        """Seconds to wait before the next call; raises the error if another cannot help.

        failure: the `grpc.RpcError`, None = the stream ended early.  is_started: part of the answer
        is there.  Then a server that is full and says when to come back is asked as often as it
        takes: it is alive, and the part would be lost.
        """
        error: ClientError = UnavailableError("the stream ended before its last response")
        if failure is not None:
            error = error_of(failure, self._endpoint.address)
        asked_s = error.retry_after_s
        is_alive = isinstance(error, BusyError) and asked_s is not None
        if self._max_retries == 0 or not (is_started and is_alive):
            self._num_failures += 1
        doublings = min(max(0, self._num_failures - 1), 10)  # 2**1024 would be no float
        backoff_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**doublings)
        delay_s = max(backoff_s, asked_s or 0.0) * (1.0 + _JITTER * self._jitter())
        may_help = isinstance(error, BusyError | UnavailableError) and not error.is_final
        is_late = time.monotonic() + delay_s >= self._ends_at
        if not may_help or self._num_failures > self._max_retries or is_late:
            raise error from failure
        return delay_s
