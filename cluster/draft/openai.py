"""Drafts by another engine that is asked over HTTP: llama-server, vLLM, ours, any of OpenAI's kind.

The engine is asked how the text goes on, greedily, and its answer is followed as it comes: what it
is ahead of the text is the draft, a chain.  An answer that the text has left is given up, and the
engine asked anew.  It has a vocabulary of its own, so everything is text (`text_bridge`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.core import Commit, DraftTask, Proposal, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.bounded import Bounded
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.committed_text import CommittedTextDrafter, RequestState, common_len
from cluster.draft.completions import (
    TEXT_PER_TOKEN,
    Answer,
    Completions,
    End,
    Endpoint,
    Verdict,
)
from cluster.draft.coupling import is_useful
from cluster.draft.hit_rates import HitRates
from cluster.draft.once_a_minute import OnceAMinute
from cluster.draft.openai_options import OpenAIOptions
from cluster.draft.text_bridge import BridgedDraft, TextBridge
from cluster.errors import ConfigError
from cluster.models.resolve import resolve
from cluster.models.token_bytes import TokenBytes, unfinished_len
from cluster.requests.tenant import DEFAULT_TENANT, PROFILE_TENANT

log = logging.getLogger(__name__)

# Answers in a row that failed or came too late, after which the engine is left alone.
_PATIENCE = 3
# Nodes that are less likely are left out.
_MIN_SURVIVAL = 0.01


@dataclass(slots=True, eq=False)
class _Request(RequestState):
    """A text and what the engine says of it.

    written: the text in bytes.  draft: how it goes on, None = nothing that still holds is known.
    answer: the one under way, which adds to the draft.  has_drafted: the draft was ahead of the
    text once.  is_ended: the text ends behind the draft.  num_foretold: tokens of the text that the
    draft had.  is_refused: the engine does not continue this text.  offered: the length of the text
    and of the chain that was proposed last.
    """

    written: bytearray = field(default_factory=bytearray)
    draft: BridgedDraft | None = None
    answer: Answer | None = None
    has_drafted: bool = False
    is_ended: bool = False
    num_foretold: int = 0
    is_refused: bool = False
    offered: tuple[int, int] = (-1, 0)


class OpenAIDrafter(CommittedTextDrafter[_Request]):
    """See `Drafter` and `Waking`.  No call waits for the engine.

    vocab_size, tokenizer_hash: the target's.
    """

    is_look_up = True

    def __init__(
        self,
        context: DrafterContext,
        options: OpenAIOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(context, _Request.opened_by)
        model = options.tokenizer or context.target_model
        if not model:
            raise ConfigError.at(
                f"drafters.{context.name}.options.tokenizer",
                "missing; name the target's model: this file does not say which it is",
            )
        tokenizer = TokenBytes.load(resolve(model, only_tokenizer=True))
        self.tokenizer_hash, self.vocab_size = tokenizer.hash, len(tokenizer.bytes_of)
        self._bridge = TextBridge(tokenizer, with_marks=options.marks == "text")
        # The engine puts its own in front.
        self._opening = self._bridge.text_of(tokenizer.opening)
        self._options = options
        self._clock = clock
        self._breaker = CircuitBreaker(_PATIENCE, options.rest_s)
        self._said = OnceAMinute()
        # Greedy and sampled requests of a task class have separate hit rates.
        self._rates: Bounded[HitRates] = Bounded(HitRates)
        self._answers: list[Answer] = []  # that may be under way
        self._wake: Callable[[], object] = lambda: None
        self._is_woken = False  # and has not proposed since
        self._engine = Completions(_endpoint(context.name, options), self._tell)

    @property
    def engine_faults(self) -> int:
        """See `Drafter`."""
        return self._breaker.faults.total()

    def wake_by(self, call: Callable[[], object]) -> None:
        """See `Waking`."""
        self._wake = call

    def _tell(self) -> None:
        """Something has come.  Called in the engine's thread, for every token."""
        if not self._is_woken:
            self._is_woken = True
            self._wake()

    def _forget_tree(self, request: _Request) -> None:
        request.offered = (-1, 0)

    def _advance(self, request: _Request, commit: Commit) -> None:
        text, kept = request.text, common_len(request.text, commit)
        if kept < len(text):
            text.truncate(kept)
            self._drop(request)
            request.written = bytearray(self._bridge.text_of(text.token_ids.tolist()))
        new = commit.token_ids[kept - commit.base_len :]
        text.append(new)
        token_ids = new.tolist()
        request.written += self._bridge.text_of(token_ids)
        if request.draft is not None:
            self._learn(request, request.draft.chain, token_ids)
            if not request.draft.follow(token_ids):
                self._leave(request)

    def _learn(self, request: _Request, chain: Sequence[int], token_ids: Sequence[int]) -> None:
        rates = self._rates_of(request)
        for foretold, token in zip(chain, token_ids, strict=False):
            rates.record(request.num_foretold + 1, hit=foretold == token)
            if foretold != token:
                break
            request.num_foretold += 1

    def _rates_of(self, request: _Request) -> HitRates:
        return self._rates.of((request.task, request.params.temperature == 0.0))

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        """See `Drafter.propose`."""
        self._is_woken = False
        proposals = []
        for request, max_nodes in self._asked(tasks):
            self._take_in(request)
            self._ask(request)
            if request.draft is not None:
                proposals += self._proposal(request, request.draft.chain, max_nodes)
        return proposals

    def _take_in(self, request: _Request) -> None:
        """Add to the draft what has come of the answer."""
        draft, answer = request.draft, request.answer
        if draft is None:
            return
        if answer is not None:
            verdict = answer.verdict  # before `take`, which then misses nothing
            agrees = draft.extend(answer.take())
            if verdict is not None and verdict.end is End.CUT and not answer.length:
                verdict = Verdict(End.FAILED, "its answer is empty")
            if verdict is not None:
                request.answer = None
                self._judge(request, draft, verdict)
            if not agrees:
                self._leave(request)
            if request.draft is None:
                return
        draft.settle()
        if draft.chain and not request.has_drafted:
            request.has_drafted = True
            self._breaker.record_success()
        if request.answer is None and draft.is_behind:
            self._leave(request)

    def _judge(self, request: _Request, draft: BridgedDraft, verdict: Verdict) -> None:
        """Draw the consequences of an answer's end."""
        if verdict.end is End.STOPPED:
            request.is_ended = True
            draft.end()
        elif verdict.end is End.REFUSED:
            request.is_refused = True
            self._say(verdict.why)
        elif verdict.end is End.FAILED:
            self._blame(verdict.why)
            if not request.has_drafted:
                self._drop(request)

    def _leave(self, request: _Request) -> None:
        """Give up the draft, if it is still there: the text goes on otherwise."""
        if request.draft is not None and not (request.has_drafted or request.is_refused):
            self._blame("its answer came too late for a draft")
        self._drop(request)

    def _drop(self, request: _Request) -> None:
        if request.answer is not None:
            request.answer.give_up()
        request.draft = request.answer = None
        request.has_drafted = request.is_ended = False
        request.num_foretold = 0

    def _blame(self, why: str) -> None:
        self._breaker.record_failure(why, self._clock())
        self._say(why)

    def _say(self, why: str) -> None:
        if count := self._said.is_due(why, self._clock()):
            log.warning("drafter's engine failed drafter=%s times=%d: %s", self._name, count, why)

    def _ask(self, request: _Request) -> None:
        """Ask the engine for more, if it is time and it may be asked."""
        draft, params = request.draft, request.params
        if request.answer is not None or request.is_ended or not self._may_ask(request):
            return
        most = self._options.max_tokens
        # An answer without an end of a word settles nothing.
        if draft is not None and (
            len(draft.chain) > most // 2 or len(draft.rest) >= TEXT_PER_TOKEN * most
        ):
            return
        if request.next_position + (len(draft.chain) if draft else 0) >= params.max_tokens - 1:
            return
        data = bytes(request.written) + (draft.rest if draft else b"")
        if not data or unfinished_len(data):
            return
        if draft is None:
            request.draft = BridgedDraft(self._bridge, data)
        request.answer = self._engine.ask(self._prompt(data))
        self._answers.append(request.answer)

    def _may_ask(self, request: _Request) -> bool:
        tenant, sends_all = request.tenant, self._options.sends_all
        is_sent = tenant != PROFILE_TENANT if sends_all else tenant == DEFAULT_TENANT
        if request.is_refused or not is_sent:
            return False
        if not self._breaker.allows(self._clock()):
            return False
        self._answers = [each for each in self._answers if each.verdict is None]
        return len(self._answers) < self._options.concurrency

    def _prompt(self, data: bytes) -> str:
        """Return the text, or as much of its end as the engine is sent."""
        too_many = len(data) - self._options.max_prompt_bytes
        if too_many <= 0:
            return data.removeprefix(self._opening).decode(errors="replace")
        # Where it begins moves seldom: what the engine keeps of a text begins with its beginning.
        step = self._options.max_prompt_bytes // 2
        return data[-(-too_many // step) * step :].decode(errors="replace").lstrip("\ufffd")

    def _proposal(self, request: _Request, chain: Sequence[int], max_nodes: int) -> list[Proposal]:
        """Return the draft's proposal, if there is one that has not been made."""
        rates, likely, survival = self._rates_of(request), 1.0, list[float]()
        for depth, token in enumerate(chain[:max_nodes]):
            # The more of an answer was right, the surer is what follows.
            likely *= rates.rate(request.num_foretold + depth + 1)
            is_wanted = is_useful(request.params, request.next_position + depth, token)
            if likely < _MIN_SURVIVAL or not is_wanted:
                break
            survival.append(likely)
        num_nodes = len(survival)
        offer = len(request.text), num_nodes
        if not num_nodes or offer == request.offered:
            return []
        request.offered = offer
        tree = TokenTree.chain(chain[:num_nodes])
        proposal = self._complete(request, tree, np.array(survival, np.float32))
        return [replace(proposal, is_complete=request.answer is None)]

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            if (request := self._requests.find(request_id)) is not None:
                self._drop(request)
        super().release(request_ids)
        if not len(self._requests):
            self._engine.rest()


def _endpoint(name: str, options: OpenAIOptions) -> Endpoint:
    key = ""
    if options.api_key_env:
        key = os.environ.get(options.api_key_env, "")
        if not (key and key.isascii() and key.isprintable()):
            raise ConfigError.at(
                f"drafters.{name}.options.api_key_env",
                f"the drafter's process has no key in its variable {options.api_key_env}; set it "
                "on every node that may run the drafter",
            )
    return Endpoint(options.endpoint, options.model, key, options.max_tokens, options.timeout_s)
