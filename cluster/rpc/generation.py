"""The public Generation service in our own nouns: what is asked, what comes back, how to resume.

No gRPC here: the client's transports and the ingress move these over whatever carries them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    SpeculationOptions,
    SpeculationStats,
    TokenArray,
    TokenLogprob,
)
from cluster.errors import (
    CapacityError,
    DrafthouseError,
    ProtocolError,
    UnavailableError,
    WorkerError,
)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to draw and when to stop; None leaves a setting to the server's default.

    The fields are those of `SamplingOptions` in protos/drafthouse/v1/generation.proto.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ResumedChoice:
    """What a broken stream had already delivered of one choice."""

    index: int
    token_ids: TokenArray
    is_finished: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """What to generate.  prompt: plain text, a conversation, or token ids.

    cache_salt: requests with another one share nothing with this one that could make it faster.
    """

    model: str
    prompt: str | Sequence[ChatMessage] | TokenArray
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    metadata: Mapping[str, str] = field(default_factory=dict)
    resume: tuple[ResumedChoice, ...] = ()
    request_id: str = ""
    cache_salt: str = field(default="", repr=False)  # a secret


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceDelta:
    """News of one choice; the last one has a finish_reason."""

    index: int
    text: str = ""
    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the whole request, resumed tokens included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResponse:
    """One piece of the stream.  usage and speculative_decoding come with the last one."""

    id: str
    model: str
    seed: int
    choices: tuple[ChoiceDelta, ...] = ()
    usage: Usage | None = None
    speculative_decoding: SpeculationStats | None = None


class GenerationCall:
    """One request's life over as many streams as it takes.  Pure state: the caller does the I/O.

    Send `request()`, pass each response through `accept`; when a stream breaks, wait
    `delay_after(error)` seconds and send `request()` again.  The seed is drawn here when none is
    given, so that the text of the next stream continues that of the last.
    """

    def __init__(self, request: GenerationRequest, max_retries: int = 5) -> None:
        """max_retries: streams in a row that may break without a single new token."""
        if request.sampling.seed is None:
            request = replace(
                request, sampling=replace(request.sampling, seed=secrets.randbits(63))
            )
        self._request = request
        self._max_retries = max_retries
        self._num_failures = 0
        self._tokens: dict[int, list[TokenArray]] = {}
        self._finished: set[int] = set()
        self.is_complete = False
        for choice in request.resume:
            self._tokens[choice.index] = [choice.token_ids]
            if choice.is_finished:
                self._finished.add(choice.index)

    def request(self) -> GenerationRequest:
        """The request, with what has arrived so far to be continued."""
        resume = tuple(
            ResumedChoice(index, np.concatenate(pieces), index in self._finished)
            for index, pieces in sorted(self._tokens.items())
        )
        return replace(self._request, resume=resume)

    def accept(self, response: GenerationResponse) -> GenerationResponse:
        """Take note of a response; returns it.  Raises ProtocolError for a choice not asked for."""
        for choice in response.choices:
            if not 0 <= choice.index < max(1, self._request.n) or choice.index in self._finished:
                raise ProtocolError(
                    f"the server sent news of choice {choice.index}, which is finished or not one "
                    f"of {self._request.n}"
                )
            self._tokens.setdefault(choice.index, []).append(choice.token_ids)
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            self._num_failures = 0
        self.is_complete = response.usage is not None
        return response

    def delay_after(self, error: DrafthouseError) -> float:
        """Seconds to wait before resuming after `error`; raises it when that is of no use.

        What has begun queues for a place like everyone else, but as long as it takes: a server
        that says when to come back is alive.
        """
        if type(error) is CapacityError and error.retry_after_s > 0.0 and self._tokens:
            return error.retry_after_s
        self._num_failures += 1
        can_retry = isinstance(error, WorkerError | UnavailableError)
        if not can_retry or self._num_failures > self._max_retries:
            raise error
        delay = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self._num_failures - 1))
        if isinstance(error, UnavailableError):
            delay = min(_MAX_DELAY_S, max(delay, error.retry_after_s))
        return delay
