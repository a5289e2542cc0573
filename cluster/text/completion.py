"""Texts as events bring them, and those of `cluster.local.LLM` when they are whole."""

from __future__ import annotations

from dataclasses import replace

from cluster.core import (
    FinishReason,
    SamplingParams,
    SpeculationStats,
    TokenEvent,
    TokenLogprob,
)
from cluster.records import frozen
from cluster.requests.fields import BeamEnd
from cluster.spec.statistics import TextStatistics
from cluster.text.stream import TextDelta, TextStream


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


class GrowingText:
    """One text: it ends with its events, or before them with a stop string.

    finish_reason: None while it goes on.  num_cached: tokens of the prompt that the prefix cache
    had, as the first event with news says; None before.
    """

    def __init__(self, text: TextStream | None) -> None:
        """text: None where there is no tokenizer."""
        self._text = text
        self.finish_reason: FinishReason | None = None
        self.stats = SpeculationStats()
        self.num_cached: int | None = None
        self._told = TextStatistics()  # where a stop string may end it

    def push(self, event: TokenEvent) -> TextDelta | None:
        """What an event brings; None behind the end, where only the statistics are of use."""
        num_tokens, reason = len(event.token_ids), event.finish_reason
        if self.num_cached is None and (num_tokens or reason is not None):
            self.num_cached = event.num_cached
        is_over = self.finish_reason is not None
        delta = TextDelta("", num_tokens)
        if self._text is not None:
            delta = self._text.push(event.token_ids)
        if not is_over:
            self._told.take(event.steps, delta.num_tokens)
        if event.stats is not None:
            self.stats = self._told.of(event.stats)
        if is_over:
            return None
        if delta.stop is None and reason is not None and self._text is not None:
            rest = self._text.finish()
            delta = TextDelta(delta.text + rest.text, delta.num_tokens, rest.stop)
        self.finish_reason = reason if delta.stop is None else FinishReason.STOP
        return delta


class PendingCompletion(GrowingText):
    """A completion that is still being generated."""

    def __init__(self, params: SamplingParams, text: TextStream | None) -> None:
        super().__init__(text)
        self._params = params
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._beam: BeamEnd | None = None

    def take(self, event: TokenEvent) -> bool:
        """Add an event; True if a stop string has just ended the text."""
        delta = self.push(event)
        if delta is None:
            return False
        self._beam = event.beams[0] if event.beams else None
        self._pieces.append(delta.text)
        self._token_ids.extend(event.token_ids[: delta.num_tokens].tolist())
        self._logprobs.extend(event.logprobs[: delta.num_tokens])
        return delta.stop is not None and event.finish_reason is None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            self._token_ids,
            "".join(self._pieces),
            self.finish_reason,
            self.stats,
            tuple(self._logprobs),
            self._params.noise_key,
            self._params.stream,
            self._beam,
            self.num_cached or 0,
        )


# The texts of a beam search, out of the one event that brings them all.


def beam_event(event: TokenEvent, rank: int) -> TokenEvent:
    """The event of one text alone, 0 = the best; only that one brings the statistics.

    Where the search has found fewer texts it ends an empty one."""
    start = sum(end.num_tokens for end in event.beams[:rank])
    stop = sum(end.num_tokens for end in event.beams[: rank + 1])
    ends = event.beams[rank : rank + 1]
    is_cut = any(not end.is_stopped for end in ends)
    return replace(
        event,
        token_ids=event.token_ids[start:stop],
        logprobs=event.logprobs[start:stop],
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        stats=event.stats if rank == 0 else None,
        beams=ends,
    )
