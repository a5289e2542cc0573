"""Requests of the public Generation service and the choices of answers, as the ingress sees them.

No gRPC here: `codec_generation` converts them from and to wire messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    SpeculationOptions,
    TokenArray,
    TokenLogprob,
)
from cluster.records import frozen, record
from cluster.requests.fields import BeamSpec, DraftStep, GrammarSpec


@frozen
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    name: str = ""


@frozen
class SamplingOptions:
    """Rules of drawing and stopping; None means the server's default.

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


@record
class ResumedChoice:
    """The tokens of one choice that a broken stream had already delivered."""

    index: int
    token_ids: TokenArray
    is_finished: bool = False


@record
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


@record
class ChoiceDelta:
    """New text and tokens of one choice; the last delta has a finish_reason.

    draft_sources: where asked for (`SpeculationOptions`), the drafters of each token.
    draft_steps: likewise, those that brought the tokens; draft_steps_dropped: those that were left
    out so far.  cumulative_logprob: of a beam search's whole text.
    """

    index: int
    text: str = ""
    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    draft_sources: tuple[tuple[str, ...], ...] = ()
    cumulative_logprob: float | None = None
    draft_steps: tuple[DraftStep, ...] = ()
    draft_steps_dropped: int = 0
