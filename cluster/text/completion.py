"""Texts of output tokens: as they arrive, to a stop string or the end; those of
`cluster.local.LLM` when they are whole; and where in a text its tokens stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from cluster.core import (
    FinishReason,
    SamplingParams,
    SpeculationStats,
    TokenArray,
    TokenEvent,
    TokenLogprob,
)
from cluster.errors import RequestError
from cluster.records import equal_record, frozen
from cluster.requests.fields import BeamEnd
from cluster.spec.statistics import TextStatistics
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import held_len


@equal_record
class TextDelta:
    """New text of a sequence.

    text: the newly final text; empty while a character or stop string is incomplete.
    num_tokens: how many of the pushed tokens belong to the output; fewer than pushed if a stop
    string ended before the last one.  stop: the stop string that ended the text.
    """

    text: str
    num_tokens: int = 0
    stop: str | None = None


class TextStream:
    """Turns output tokens into text deltas; their concatenation is the answer's text.

    Only text that may begin a stop string is held back.  The string that ends first wins; of
    several that end at one character, the longest.  So the text returned so far depends only on
    the tokens, not on how they were grouped, and a resumed text continues where it stopped.  Takes
    microseconds per token.

    num_tokens: of the output, up to and including the one that completed a stop string.
    is_finished: after a stop string or `finish`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: TokenArray | Sequence[int] = (),
    ) -> None:
        """include_stop: keep the stop string in the text.  min_tokens: output tokens whose
        text is not searched.  prompt_ids: the prompt; needed to keep the space before the first
        word in vocabularies that join spaces to words.  Raises RequestError for an empty stop.
        """
        self._detokenizer = tokenizer.detokenizer(
            prompt_ids, skip_special_tokens=skip_special_tokens
        )
        if not all(stop_strings):  # it would end every text at once
            raise RequestError("stop contains an empty string; leave it out", param="stop")
        self._stops = stop_strings
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        self.is_finished = False

    def push(self, token_ids: TokenArray | Sequence[int]) -> TextDelta:
        """Add the next output tokens; ignored after the end of the text."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        text, num_tokens, stop = "", 0, None
        # Only the search for a stop string must know which token brings which text.
        for group in [(token,) for token in ids] if self._stops else [ids]:
            if self.is_finished:
                break
            num_tokens += len(group)
            self.num_tokens += len(group)
            piece, stop = self._search(self._detokenizer.feed(group))
            text += piece
        return TextDelta(text, num_tokens, stop)

    def finish(self) -> TextDelta:
        """End the sequence; returns the held-back text, incomplete characters as U+FFFD."""
        if self.is_finished:
            return TextDelta("")
        text, stop = self._search(self._detokenizer.flush())
        self.is_finished = True
        return TextDelta(text + self._held, 0, stop)

    def _search(self, piece: str) -> tuple[str, str | None]:
        """The text that is final after `piece`, and the stop string that ends it or None."""
        if not self._stops or self.num_tokens <= self._min_tokens:
            return piece, None
        text, self._held = self._held + piece, ""
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if not ends:
            certain = len(text) - held_len(text, self._stops)
            self._held = text[certain:]
            return text[:certain], None
        self.is_finished = True
        end, _, stop = min(ends)
        return text[: end if self._include_stop else end - len(stop)], stop


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


# Tokens' places in a completion's text.


class TextOffsets:
    """Of one choice, in characters of its text, which an echoed prompt begins.

    A token with only a part of a character stands where the character does; one without text, as
    a special token that is left out, where the next text does.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: TokenArray, *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._output = tokenizer.detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._text_len = 0

    def of_prompt(self, token_ids: Iterable[int], echo: str) -> list[int]:
        """Of an echoed prompt's tokens; `of_output` goes on behind the echo."""
        special_ids = self._tokenizer.special_ids
        shown = self._tokenizer.detokenizer()
        offsets: list[int] = []
        place = 0
        for token in token_ids:
            offsets.append(min(place, len(echo)))
            is_special = token in special_ids
            text = self._tokenizer.token_text(token) if is_special else shown.feed((token,))
            # A special token of the tokenizer's own making is not in the text that was sent.
            if not is_special or echo.startswith(text, place):
                place += len(text)
        self._text_len = len(echo)
        return offsets

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        """Of the next tokens of the output."""
        offsets: list[int] = []
        for token in token_ids:
            offsets.append(self._text_len)
            self._text_len += len(self._output.feed((token,)))
        return offsets
