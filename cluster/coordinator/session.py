"""One request at the coordinator: its tokens are the truth, every cache elsewhere is a guess."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.coordinator.idle import PlainSteps
from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.replica import DrafterReplica, Subscription
from cluster.coordinator.statistics import RequestStatistics
from cluster.coordinator.texts import Text
from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    TokenArray,
    TokenEvent,
    TokenTree,
    Verdict,
    VerifyItem,
    token_array,
)
from cluster.spec.budget import NO_DRAFTS
from cluster.token_log import TokenLog

Deliver = Callable[[TokenEvent], None]

# Each row of a step that scores has logits of the whole vocabulary: 256 are 160 MB of a large one.
_MAX_SCORED_ROWS = 256
# Of a target that does not say how many rows its steps have.
_FEW_ROWS = 32


class Status(enum.StrEnum):
    WAITING = "waiting"  # admitted, has no place at a target
    PREFILL = "prefill"  # a target must first be sent, or is computing, a longer delta
    READY = "ready"  # the target holds all but the last token; joins the next batch
    DECODING = "decoding"  # in the batch the target is working on
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a text besides its own stop tokens.

    max_context_len: prompt and output together, 0 = unknown.  vocab_size: 0 = unknown.
    """

    max_context_len: int = 0
    vocab_size: int = 0


class Seat(Protocol):
    """The target at which a session has its place, as far as its drafters are concerned.

    residents: the drafters that run inside it, by name.
    """

    id: str
    devices: frozenset[str]
    residents: dict[str, DrafterReplica]

    @property
    def num_sessions(self) -> int: ...


class Session(Text):
    """The coordinator's copy of one request."""

    def __init__(
        self, session_id: str, request: Request, deliver: Deliver, arrival: int, now: float
    ) -> None:
        resumed = np.concatenate([request.prompt_ids, request.output_ids])
        tokens = TokenLog(resumed, len(resumed) + min(request.params.max_tokens, 1024))
        # The id is unique at this coordinator: the wire's request id.
        super().__init__(session_id, request.group, tokens)
        self.request = request
        self.deliver = deliver
        self.arrival = arrival
        self.arrived_at = now
        self.shunned_target = ""  # the one that failed it last
        self.ready_since = now
        self.last_event_at: float | None = None
        self.prompt_len = len(request.prompt_ids)
        self._max_len = self.prompt_len + request.params.max_tokens
        # A given output is scored to its end: no token of it stops anything.
        self.forced = token_array(request.params.forced_ids)
        self.stop_ids = frozenset(() if self.is_scored else request.params.stop_token_ids)
        self.status = Status.WAITING
        self.generation = 0
        self.target: Seat | None = None
        self.target_len = 0  # committed tokens the target is believed to hold
        self.sends_params = True
        self.in_flight: InFlight | None = None
        self.num_misses = 0  # answers "I have m" since the last verdict
        self.num_retries = 0  # worker errors since the last verdict
        self.drafters: tuple[str, ...] = ()
        # Drafters that declined this request, and until when they are not asked again.
        self.declined: dict[str, float] = {}
        self.asked = NO_DRAFTS  # what its target's residents draft after the next verdict
        self.subscriptions: dict[str, Subscription] = {}
        self.statistics = RequestStatistics()
        self.plain_steps = PlainSteps()
        self.queue_time_s: float | None = None  # until its first place at a target
        self.num_cached: int | None = None  # tokens of the prompt, in the first verdict's step

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    def remaining_tokens(self, limits: Limits) -> int:
        """How many more tokens may be emitted."""
        end = self._max_len
        if limits.max_context_len:
            end = min(end, limits.max_context_len)
        return end - len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """Whether the output is given, and only its log-probabilities are asked for."""
        return len(self.forced) > 0

    def forced_tree(self, max_batch_tokens: int) -> TokenTree:
        """The next tokens of a given output as a chain, which a step accepts whole; else none.

        max_batch_tokens: rows of the target's steps, 0 = unknown.
        """
        # Like a chunk of a prefill: a share of a step that leaves room for those who decode.
        most = min(max_batch_tokens // 4, _MAX_SCORED_ROWS) if max_batch_tokens else _FEW_ROWS
        start = self.num_output_tokens
        # The last token needs no node: it is what the target says after the others.
        return TokenTree.chain(self.forced[start : min(start + max(most, 1), len(self.forced) - 1)])

    def item(self, tree: TokenTree) -> VerifyItem:
        """The next item for the target: what its cache lacks, and `tree` after that."""
        base_len, tokens = self.target_len, self.tokens
        opens = self.sends_params or base_len == 0
        self.sends_params = False
        hosted = self.target.residents if opens and self.target is not None else {}
        return VerifyItem(
            self.id,
            self.generation,
            base_len,
            tokens.hash_at(base_len),
            tokens.since(base_len),
            tree,
            self.prompt_len,
            self.request.params if opens else None,
            self.request.tenant if opens else b"",
            self.asked.num_nodes,
            self.request.task if opens else "",
            tuple(name for name in self.drafters if name in hosted) if hosted else (),
            self.request.adapter if opens else "",
            not self.asked.with_models,
        )

    def cut(self, token_ids: TokenArray, limits: Limits) -> tuple[int, FinishReason | None]:
        """How many of the target's tokens belong to the text, and whether it ends there."""
        remaining = self.remaining_tokens(limits)
        if self.stop_ids:
            before_stop_counts = self.request.params.min_tokens - self.num_output_tokens
            for index, token in enumerate(token_ids[:remaining].tolist()):
                if token in self.stop_ids and index >= before_stop_counts:
                    return index, FinishReason.STOP
        if len(token_ids) >= remaining:
            return max(remaining, 0), FinishReason.LENGTH
        return len(token_ids), None

    def note_plain_step(self, *, is_paused: bool, is_declined: bool) -> None:
        """A step without drafts begins; is_paused: drafters were asked for none.  is_declined: for
        the batch none were worth their time."""
        has_drafts = is_declined or any(
            held.base_len == len(self.tokens) and held.num_nodes > 0 for held in self.held.values()
        )
        self.plain_steps.note(is_paused=is_paused, has_drafts=has_drafts)

    def event(
        self,
        position: int,
        verdict: Verdict | None,
        finish_reason: FinishReason | None,
        in_flight: InFlight | None = None,
    ) -> TokenEvent:
        """The tokens since output `position` as the client's event.

        in_flight: what the verdict is about, None where that is of no interest.
        """
        stats = self.statistics.snapshot() if finish_reason else None
        queue_time_s = (self.queue_time_s or 0.0) if finish_reason else 0.0
        num_cached = self.num_cached or 0
        if verdict is None:
            return TokenEvent(
                self.request.id,
                position,
                EMPTY_TOKENS,
                finish_reason=finish_reason,
                stats=stats,
                queue_time_s=queue_time_s,
                num_cached=num_cached,
            )
        token_ids = verdict.token_ids
        if not verdict.beams:
            token_ids = self.tokens.since(self.prompt_len + position)
        sources: tuple[tuple[str, ...], ...] = ()
        if in_flight is not None and self.request.speculation.return_draft_sources:
            sources = in_flight.sources(verdict.path, len(token_ids))
        return TokenEvent(
            self.request.id,
            position,
            token_ids,
            verdict.logprobs[: len(token_ids)],
            finish_reason,
            stats,
            draft_sources=sources,
            queue_time_s=queue_time_s,
            num_cached=num_cached,
            beams=verdict.beams,
        )
