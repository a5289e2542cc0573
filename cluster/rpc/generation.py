"""Requests and responses of the public Generation service, and how to resume a stream.

No gRPC here: the client's transports and the ingress convert these to and from wire messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.beam_spec import BeamSpec
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
from cluster.grammar_spec import GrammarSpec
from cluster.seeds import asked_seed, draw_seed

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
    """How to sample and when to stop; None means the server's default.

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
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    beam_search: BeamSpec | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ResumedChoice:
    """The tokens of one choice that a broken stream had already delivered."""

    index: int
    token_ids: TokenArray
    is_finished: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A generation request.  prompt: plain text, a conversation, or token ids.

    prediction: the output that is expected; drafts may come from it, the texts do not.

    cache_salt: requests with different salts share no prefix cache and no learned text.
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
    prediction: str = field(default="", repr=False)  # text


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceDelta:
    """New text and tokens of one choice; the last delta has a finish_reason.

    draft_sources: where asked for (`SpeculationOptions`), the drafters of each token.
    cumulative_logprob: of a beam search's whole text.
    """

    index: int
    text: str = ""
    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    draft_sources: tuple[tuple[str, ...], ...] = ()
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the whole request, including resumed tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResponse:
    """One message of the stream; only the last has what stands after the choices.

    prompt_logprobs: where asked for, of the prompt's tokens from the second on.
    prediction_idle_because: why nobody drafted from the request's prediction, "" = somebody did.
    """

    id: str
    model: str
    seed: int
    choices: tuple[ChoiceDelta, ...] = ()
    usage: Usage | None = None
    speculative_decoding: SpeculationStats | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prediction_idle_because: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """One name that requests may give as their model.

    root: the model behind it.  parent: of an adapter, the model that it belongs to, else "".
    max_context_len: prompt and output together, in tokens; 0 = not known yet.
    """

    id: str
    root: str
    parent: str = ""
    max_context_len: int = 0


class GenerationCall:
    """The state of one request over one or more streams; the caller does the I/O.

    Send `request()` and pass each response through `accept`.  When a stream breaks, wait
    `delay_after(error)` seconds and send `request()` again.  If the request has no seed, one is
    drawn here, so that the next stream continues the same text.
    """

    def __init__(self, request: GenerationRequest, max_retries: int = 5) -> None:
        """max_retries: how many streams in a row may break without a new token."""
        if asked_seed(request.sampling.seed) is None:
            request = replace(request, sampling=replace(request.sampling, seed=draw_seed()))
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
        """The request to send, with the tokens received so far to be continued."""
        resume = tuple(
            ResumedChoice(index, np.concatenate(pieces), index in self._finished)
            for index, pieces in sorted(self._tokens.items())
        )
        return replace(self._request, resume=resume)

    def accept(self, response: GenerationResponse) -> GenerationResponse:
        """Record a response and return it; raises ProtocolError for a choice not requested."""
        for choice in response.choices:
            if not 0 <= choice.index < max(1, self._request.n) or choice.index in self._finished:
                raise ProtocolError(
                    f"the server sent choice {choice.index}, which is finished or not one of the "
                    f"{self._request.n} requested"
                )
            self._tokens.setdefault(choice.index, []).append(choice.token_ids)
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            self._num_failures = 0
        self.is_complete = response.usage is not None
        return response

    def delay_after(self, error: DrafthouseError) -> float:
        """Seconds to wait before resuming after `error`; raises `error` if a retry cannot help.

        A request that has already received tokens is retried without limit while the server
        answers that it is busy and says when to retry: such a server is alive.
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
