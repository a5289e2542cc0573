"""One prompt of a request, with its log-probabilities where they are asked for; and one sample of
it, whose tokens become text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationOptions,
    TokenArray,
    TokenEvent,
    TokenLogprob,
)
from cluster.records import record
from cluster.requests.fields import DraftStep
from cluster.text.completion import GrowingText, TextStream, beam_event
from cluster.text.dialect import Dialect
from cluster.text.prompt import ChatUse, Prompt
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_calls.base import NOTHING, Part
from deployments.ingress.spec import GenerationSpec, Resumed
from deployments.ingress.ticket import Ticket

PromptLogprobs = Sequence[TokenLogprob | None]


@dataclass(slots=True)
class PreparedPrompt:
    """One prompt of a request, with what is known of it once the request has started.

    asked: as the client sent it.  seed: of its samples, given or drawn.  is_cut: whether it has
    lost tokens to truncate_prompt_tokens.  ticket: of what scores it; None = nobody asks, or it has
    one token, of which nothing can be said.  scored: what has come of it, from the second token on.
    """

    asked: Prompt
    seed: int
    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    is_cut: bool = False
    ticket: Ticket | None = None
    scored: list[TokenLogprob] = field(default_factory=list)

    def scoring(self, sample: Request, num_top: int) -> Request:
        """The request for its log-probabilities.

        sample: one for the text that follows.  num_top: alternatives."""
        given = tuple(self.token_ids[1:].tolist())
        return Request(
            id=f"{sample.id}-prompt",
            prompt_ids=self.token_ids[:1],
            params=SamplingParams(
                temperature=0.0, max_tokens=len(given), forced_ids=given, logprobs=num_top
            ),
            task=sample.task,
            speculation=SpeculationOptions(enabled=False),
            tenant=sample.tenant,
            adapter=sample.adapter,
        )

    def take(self) -> bool:
        """Read what has come; True once it is complete.  Raises the error that ended it."""
        if self.ticket is None:
            return True
        while events := self.ticket.take():  # once more, for an error that came with them
            for event in events:
                self.scored += event.logprobs
        return self.ticket.finished

    def logprobs(self, num_top: int | None = None) -> PromptLogprobs:
        """Of each token, where they were asked for and all have come; None of the first, before
        which there is nothing.  num_top: of each so many alternatives at most, None = all."""
        return [None, *(replace(one, top=one.top[:num_top]) for one in self.scored)]


@record
class Delta:
    """New text and tokens of one choice; the last delta has a finish_reason.

    token_ids: only tokens that belong to the output.  stop: the stop string that ended the text,
    with FinishReason.STOP.  draft_sources: where asked for (`SpeculationOptions`), the drafters of
    each token.  draft_steps: likewise, those that brought the tokens; draft_steps_dropped: those
    that were left out so far.  cumulative_logprob: of a beam search's whole text.

    Of part gRPC is told the text alone.  What it is not told: has_calls: some came, now or before.
    is_cut: whether the text so far ends within a call, or before one that is forced.
    """

    index: int
    part: Part = NOTHING
    token_ids: TokenArray = field(default_factory=lambda: EMPTY_TOKENS)
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    draft_sources: tuple[tuple[str, ...], ...] = ()
    cumulative_logprob: float | None = None
    draft_steps: tuple[DraftStep, ...] = ()
    draft_steps_dropped: int = 0
    has_calls: bool = False
    is_cut: bool = False

    @property
    def text(self) -> str:
        return self.part.text

    @property
    def says_nothing(self) -> bool:
        """True if there are only tokens, whose text is held back."""
        return self.part == NOTHING and self.finish_reason is None


class Choice(GrowingText):
    """One sample of a prompt, and what its text is read as."""

    def __init__(
        self,
        index: int,
        request: Request,
        spec: GenerationSpec,
        tokenizer: Tokenizer,
        dialect: Dialect,
    ) -> None:
        """request: what is submitted.  dialect: in which a conversation is answered."""
        use = spec.prompts[0].use
        if use is None:  # the text is the answer
            use, dialect = ChatUse(), Dialect()
        shows_specials = dialect.shows_specials(with_calls=use.reads_calls)
        self.text = TextStream(
            tokenizer,
            spec.stop,
            include_stop=spec.include_stop,
            skip_special_tokens=spec.skip_special_tokens and not shows_specials,
            min_tokens=spec.params.min_tokens,
            prompt_ids=request.prompt_ids,
        )
        super().__init__(self.text)
        self.index = index
        self.rank = index % spec.num_choices  # among its prompt's samples
        self.request = request
        self._reader = dialect.reader(request.prompt_ids, use)
        if len(request.output_ids):
            # The text was delivered before the stream broke; only the position is needed.
            self._reader.push(self.text.push(request.output_ids).text)
        self.num_resumed = self.text.num_tokens  # which another request has counted
        self.ticket: Ticket | None = None  # it is over, not submitted yet, or never is
        self.queue_time_s = self.prefill_time_s = 0.0
        # Its text may have been whole before the stream broke.
        self._is_over = spec.resumed.get(index, Resumed()).is_finished or self.text.is_finished

    @property
    def done(self) -> bool:
        """Whether nothing but statistics may come."""
        return self._is_over or self.finish_reason is not None

    def take(self) -> list[Delta]:
        """The deltas since the last call; raises the error of one that fails."""
        if self.ticket is None:
            if self.done:
                return []
            # Only its prompt was asked about: it ends without a token.
            self.finish_reason = FinishReason.LENGTH
            return [Delta(self.index, finish_reason=self.finish_reason)]
        deltas = [delta for event in self.ticket.take() for delta in self.feed(event)]
        if self.done and not self.ticket.is_complete:
            # Without this the coordinator would continue after a stop string; its last event has
            # the statistics.
            self.ticket.complete()
        return deltas

    def feed(self, event: TokenEvent) -> list[Delta]:
        """The new text and tokens in `event`; the last delta has the tokens."""
        if event.beams:
            event = beam_event(event, self.rank)
        delta, reason = self.push(event), self.finish_reason
        if event.stats is not None:
            self.queue_time_s, self.prefill_time_s = event.queue_time_s, event.prefill_time_s
        if delta is None or not (delta.text or delta.num_tokens or reason):
            return []
        kept = delta.num_tokens
        parts = self._reader.push(delta.text)
        if reason is not None:
            parts += self._reader.finish()
        *first, last = parts or [NOTHING]
        end = Delta(
            self.index,
            last,
            token_ids=event.token_ids[:kept],
            logprobs=event.logprobs[:kept],
            finish_reason=reason,
            stop=delta.stop,
            draft_sources=event.draft_sources[:kept],
            cumulative_logprob=event.beams[0].logprob if event.beams else None,
            draft_steps=event.draft_steps,
            draft_steps_dropped=self.ticket.trace.num_dropped if self.ticket else 0,
            has_calls=self._reader.has_calls,
            is_cut=self._reader.is_cut,
        )
        return [*(Delta(self.index, part) for part in first), end]
