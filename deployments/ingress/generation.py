"""Runs one client request, from HTTP or gRPC: from the validated spec to pieces of text."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from cluster.core import FinishReason, Request, SpeculationStats
from cluster.errors import DeadlineError, DrafthouseError
from cluster.metrics.recorder import Tokens, ToldRequest
from cluster.requests.fields import draw_seed
from cluster.rpc.link import run_until_first_ends
from cluster.spec.statistics import combined
from cluster.text.dialect import Dialect
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.choice import Choice, Delta, PreparedPrompt
from deployments.ingress.coordinators import Coordinators
from deployments.ingress.keys import Use
from deployments.ingress.prompts import encode_all, prediction_ids
from deployments.ingress.spec import GenerationSpec, Resumed
from deployments.ingress.ticket import Ticket

# A coordinator answers a cancellation at once, but one that has just died never does.
_LAST_EVENT_PATIENCE_S = 1.0


@dataclass(eq=False, repr=False)
class Generation:
    """Runs all samples of all prompts of one request.

    Use: `await start()`, iterate `deltas()`, and `close()` in any case.

    id: in the answer, possibly chosen by the client.  spec: what it was asked.
    max_chars_per_token: longer prompts are refused as too long without tokenising them.
    timeout_s: from now on; then `deltas` raises DeadlineError.  dialect: the model's.
    use: of its key's limits.
    arrived_at, first_token_at: seconds of time.monotonic.  error_code: of what has ended it.
    told: what counts it, once it has started.
    when_grown, when_closed: who hears of its tokens as they come, and of its end.
    """

    id: str
    spec: GenerationSpec
    tokenizer: Tokenizer
    coordinators: Coordinators
    max_chars_per_token: float
    timeout_s: InitVar[float | None] = None
    dialect: Dialect = field(default_factory=Dialect)
    use: Use | None = None
    choices: list[Choice] = field(default_factory=list)
    first_token_at: float | None = None
    error_code: str = ""
    told: ToldRequest | None = None
    when_grown: list[Callable[[int], None]] = field(default_factory=list)
    when_closed: list[Callable[[Generation], None]] = field(default_factory=list)
    _failure: DrafthouseError | None = None
    _alarm: asyncio.TimerHandle | None = None

    def __post_init__(self, timeout_s: float | None) -> None:
        # Clients may choose equal ids; between our processes every request has a unique one.
        self._wire_id = uuid.uuid4().hex
        self.arrived_at = time.monotonic()
        self._news, self.closed = asyncio.Event(), asyncio.Event()
        seed = self.spec.seed
        self.prompts = [
            PreparedPrompt(asked, draw_seed() if seed is None else seed)
            for asked in self.spec.prompts
        ]
        if timeout_s is not None:  # one timer, so that a wait for events costs none
            late = DeadlineError(
                f"the answer was not ready within {timeout_s:g} s; allow more time in "
                "x-request-timeout-ms, up to api.max_request_timeout_s"
            )
            self._alarm = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)

    def prompt_of(self, choice: int) -> PreparedPrompt:
        """The prompt that the choice continues."""
        return self.prompts[choice // self.spec.num_choices]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the prefix cache; those of a scored prompt are computed."""
        if self.spec.prompt_logprobs is not None:
            return 0
        # Other samples of a prompt find what the first one has computed.
        return sum(one.num_cached or 0 for one in self.choices[:: self.spec.num_choices])

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices, up to the end of a stop string."""
        return sum(choice.text.num_tokens for choice in self.choices)

    @property
    def tokens(self) -> Tokens:
        """All of these; of the output those that this request has brought."""
        return Tokens(
            prompt=self.num_prompt_tokens,
            cached=self.num_cached_tokens,
            output=self.num_output_tokens - sum(choice.num_resumed for choice in self.choices),
        )

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended, so that usage and statistics are final."""
        return all(choice.done for choice in self.choices)

    @property
    def stats(self) -> SpeculationStats:
        """The speculation statistics of all choices together."""
        return combined([choice.stats for choice in self.choices])

    async def start(self) -> None:
        """Tokenise and submit; raises RequestError for prompts that do not fit, before any work."""
        spec = self.spec
        await self.coordinators.wait_connected()
        limit = self.coordinators.max_context_len
        found = await encode_all(
            spec.prompts,
            self.tokenizer,
            limit,
            self.max_chars_per_token,
            add_special_tokens=spec.add_special_tokens,
        )
        for prompt, token_ids in zip(self.prompts, found, strict=True):
            prompt.token_ids = spec.truncated(token_ids, limit)
            prompt.is_cut = len(prompt.token_ids) < len(token_ids)
        if self.use is not None:
            self.use.take_tokens(self.num_prompt_tokens)
        prediction = await prediction_ids(spec, self.tokenizer, self.max_chars_per_token)
        left_s = 0.0  # it has no limit
        if self._alarm is not None:
            left_s = self._alarm.when() - asyncio.get_running_loop().time()
        # What ends the text: the request's tokens, and the model's own unless it says no.
        own = () if spec.ignore_eos else self.tokenizer.eos_token_ids
        stop_token_ids = tuple(sorted({*own, *spec.params.stop_token_ids}))
        for index in range(len(self.prompts) * spec.num_choices):
            prompt, sample = self.prompt_of(index), index % spec.num_choices
            request = Request(
                id=f"{self._wire_id}-{index}",
                prompt_ids=prompt.token_ids,
                params=replace(
                    spec.params,
                    seed=prompt.seed,
                    # Choices that share a seed use different streams.
                    stream=sample if spec.seed is None else index,
                    max_tokens=spec.max_tokens(len(prompt.token_ids), limit),
                    stop_token_ids=stop_token_ids,
                    prediction=prediction,
                    grammar=self.dialect.held_to(spec.params.grammar, prompt.token_ids),
                ),
                task=spec.task,
                speculation=spec.speculation,
                output_ids=spec.resumed.get(index, Resumed()).token_ids,
                # The score before it was: it need not queue again.
                was_admitted=spec.prompt_logprobs is not None,
                tenant=spec.tenant,
                adapter=spec.adapter,
                timeout_s=left_s,
                segment=spec.segment,
                counts_steps=bool(spec.stop),
            )
            # Nothing can be said of a prompt's first token.
            if spec.prompt_logprobs is not None and sample == 0 and len(prompt.token_ids) > 1:
                scoring = prompt.scoring(request, spec.prompt_logprobs)
                prompt.ticket = self.coordinators.submit(scoring, self._news)
            self.choices.append(Choice(index, request, spec, self.tokenizer, self.dialect))
        if spec.prompt_logprobs is None:
            self._submit()

    def _submit(self) -> None:
        for choice in self.choices:
            if choice.done or self.spec.is_prompt_only:
                continue
            if choice.rank and choice.request.params.beams is not None:
                # One search finds all texts.
                choice.ticket = self.choices[choice.index - choice.rank].ticket
                continue
            choice.ticket = self.coordinators.submit(choice.request, self._news)

    async def admitted(self) -> None:
        """Wait until every choice is admitted, or what scores its prompt; raises the error of one
        that is refused."""
        with self.noted():
            while not all(ticket.is_admitted() for ticket in self._tickets()):
                await self._wait()

    def _tickets(self) -> list[Ticket]:
        """Of all that was submitted so far."""
        parts: tuple[Choice | PreparedPrompt, ...] = (*self.choices, *self.prompts)
        return [part.ticket for part in parts if part.ticket is not None]

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """An error raised inside names the field of the body, and is in the line of the log."""
        try:
            with self.spec.names.told():
                yield
        except DrafthouseError as error:
            self.error_code = error.code
            raise

    async def _wait(self) -> None:
        """Wait for events; raises DeadlineError when the request's time is up."""
        await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure

    async def unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that may take long, like waiting for a coordinator, and leave it with the
        request's error where that comes first."""

        async def fail() -> None:
            while True:
                await self._wait()

        await run_until_first_ends(work, fail())

    def fail(self, error: DrafthouseError) -> None:
        """End it with an error, which whoever iterates is told."""
        self._failure = error
        self._news.set()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield the deltas since the last piece; the last piece, which has none where there was
        nothing left to say, waits for all statistics.

        Raises the error of the first choice that fails.
        """
        with self.noted():
            if self.spec.prompt_logprobs is not None:
                while not all(prompt.take() for prompt in self.prompts):
                    await self._wait()
                self._submit()
            while True:
                pieces = self._take()
                num_new = sum(len(piece.token_ids) for piece in pieces)
                if num_new and self.first_token_at is None:
                    self.first_token_at = time.monotonic()
                if self.is_over:
                    await self._wait_for_last_events()
                if pieces:
                    if self.told is not None:
                        self.told.grow(self.tokens)
                    for hear in self.when_grown:
                        hear(num_new)
                if pieces or self.is_over:
                    yield pieces
                if self.is_over:
                    return
                await self._wait()

    def _take(self) -> list[Delta]:
        return [piece for choice in self.choices for piece in choice.take()]

    async def _wait_for_last_events(self) -> None:
        with contextlib.suppress(TimeoutError, DrafthouseError):
            async with asyncio.timeout(_LAST_EVENT_PATIENCE_S):
                while not all(ticket.finished for ticket in self._tickets()):
                    await self._wait()
        self._take()

    def close(self) -> None:
        """Cancel the choices that still run; their resources are freed at once."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self._alarm is not None:
            self._alarm.cancel()
        if self.told is not None:
            unfinished = FinishReason.ERROR if self.error_code else FinishReason.CANCELLED
            reasons = [choice.finish_reason or unfinished for choice in self.choices]
            self.told.end(reasons, self.error_code)
        if self.use is not None:
            self.use.leave(Tokens() if self.told is None else self.told.tokens)
        for ticket in self._tickets():
            ticket.close()
        for hear in self.when_closed:
            hear(self)
