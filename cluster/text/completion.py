"""The texts of `cluster.local.LLM`, whole and on their way."""

from __future__ import annotations

from dataclasses import replace

from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    SamplingParams,
    SpeculationStats,
    TokenEvent,
    TokenLogprob,
)
from cluster.records import frozen
from cluster.requests.fields import BeamEnd
from cluster.spec.statistics import TextStatistics
from cluster.text.stream import TextStream


@frozen
class Completion:
    """The generated continuation of one prompt.

    token_ids: without stop tokens.  text: "" if the model's folder has no tokenizer.
    logprobs: one entry per token if SamplingParams.logprobs asks for them.
    seed, stream: the noise key; SamplingParams with both reproduce the text.
    beam: of a beam search, the text's score and how it ended.
    num_cached: tokens of the prompt that the target's prefix cache had.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: SpeculationStats
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int = 0
    stream: int = 0
    beam: BeamEnd | None = None
    num_cached: int = 0


class PendingCompletion:
    """A completion that is still being generated."""

    def __init__(self, params: SamplingParams, text: TextStream | None) -> None:
        self._params = params
        self._text = text
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: FinishReason | None = None
        self._stats = SpeculationStats()
        self._told = TextStatistics()  # where a stop string may end it
        self._beam: BeamEnd | None = None
        self._num_cached = 0

    def take(self, event: TokenEvent) -> bool:
        """Add an event; True if a stop string has just ended the text."""
        self._stats = event.stats or self._stats
        self._num_cached = self._num_cached or event.num_cached
        if self._reason is not None:
            return False
        self._beam = event.beams[0] if event.beams else None
        num_tokens, stop = len(event.token_ids), None
        if self._text is not None:
            delta = self._text.push(event.token_ids)
            self._pieces.append(delta.text)
            num_tokens, stop = delta.num_tokens, delta.stop
        self._told.take(event.steps, num_tokens)
        self._token_ids.extend(event.token_ids[:num_tokens].tolist())
        self._logprobs.extend(event.logprobs[:num_tokens])
        if stop is not None:
            self._reason = FinishReason.STOP
            return event.finish_reason is None
        self._reason = event.finish_reason
        return False

    def completion(self) -> Completion:
        assert self._reason is not None
        if self._text is not None:
            rest = self._text.finish()
            self._pieces.append(rest.text)
            if rest.stop is not None:
                self._reason = FinishReason.STOP
        return Completion(
            self._token_ids,
            "".join(self._pieces),
            self._reason,
            self._told.of(self._stats),
            tuple(self._logprobs),
            self._params.noise_key,
            self._params.stream,
            self._beam,
            self._num_cached,
        )


# The texts of a beam search, out of the one event that brings them all.


def beam_event(event: TokenEvent, rank: int) -> TokenEvent:
    """The event of one text alone, 0 = the best; only that one brings the statistics.

    Where the search has found fewer texts it ends an empty one."""
    stats = event.stats if rank == 0 else None
    if rank >= len(event.beams):
        return replace(
            event,
            token_ids=EMPTY_TOKENS,
            logprobs=(),
            stats=stats,
            beams=(),
            finish_reason=FinishReason.STOP,
        )
    start = sum(end.num_tokens for end in event.beams[:rank])
    end = event.beams[rank]
    stop = start + end.num_tokens
    return replace(
        event,
        token_ids=event.token_ids[start:stop],
        logprobs=event.logprobs[start:stop],
        finish_reason=FinishReason.STOP if end.is_stopped else FinishReason.LENGTH,
        stats=stats,
        beams=(end,),
    )
