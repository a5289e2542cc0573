"""One request at the coordinator: its tokens are the truth, every cache elsewhere is a guess."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.replica import Subscription
from cluster.coordinator.statistics import RequestStatistics
from cluster.core import (
    EMPTY_TOKENS,
    FinishReason,
    Request,
    TokenArray,
    TokenEvent,
    TokenTree,
    Verdict,
    VerifyItem,
)
from cluster.spec.adaptive_length import AdaptiveDraftLength
from cluster.spec.guard import DeficitGuard
from cluster.token_log import TokenLog

Deliver = Callable[[TokenEvent], None]
Group = tuple[str, bool]  # task class; sampled, or greedy


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

    silences: by law (True = sampled), in how many rounds at least they are asked for nothing.
    """

    id: str
    devices: frozenset[str]
    silences: dict[bool, int]
    step_time_s: float
    num_rounds: int
    asked_in_round: int

    @property
    def num_sessions(self) -> int: ...


class Session:
    """The coordinator's copy of one request."""

    def __init__(
        self, session_id: str, request: Request, deliver: Deliver, arrival: int, now: float
    ) -> None:
        self.id = session_id  # unique at this coordinator; the wire's request id
        self.request = request
        self.deliver = deliver
        self.arrival = arrival
        self.arrived_at = now
        self.shunned_target = ""  # the one that failed it last
        self.ready_since = now
        self.dispatched_at = now  # with the last batch
        # Commits since its target's drafters were silenced.
        self.num_silent_commits = 0
        self.is_sampled = request.params.temperature > 0.0
        self.in_sampled_batch = self.is_sampled  # the law of its last batch
        self.last_event_at: float | None = None
        self.prompt_len = len(request.prompt_ids)
        resumed = np.concatenate([request.prompt_ids, request.output_ids])
        self.tokens = TokenLog(resumed, len(resumed) + min(request.params.max_tokens, 1024))
        self._max_len = self.prompt_len + request.params.max_tokens
        self.stop_ids = frozenset(request.params.stop_token_ids)
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
        self.max_draft_tokens = 0
        self.weight = 1.0  # what its speed counts for beside that of others
        self.draft_length = AdaptiveDraftLength()  # where the budget is adaptive
        self.subscriptions: dict[str, Subscription] = {}
        self.statistics = RequestStatistics()
        self.guard: DeficitGuard | None = None  # what its drafts may cost

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def group(self) -> Group:
        """What makes batches homogeneous, and drafts alike."""
        return self.request.task, self.is_sampled

    def remaining_tokens(self, limits: Limits) -> int:
        """How many more tokens may be emitted."""
        end = self._max_len
        if limits.max_context_len:
            end = min(end, limits.max_context_len)
        return end - len(self.tokens)

    def item(self, tree: TokenTree) -> VerifyItem:
        """The next item for the target: what its cache lacks, and `tree` after that."""
        base_len, tokens = self.target_len, self.tokens
        params = self.request.params if self.sends_params or base_len == 0 else None
        self.sends_params = False
        return VerifyItem(
            self.id,
            self.generation,
            base_len,
            tokens.hash_at(base_len),
            tokens.since(base_len),
            tree,
            self.prompt_len,
            params,
            b"" if params is None else self.request.tenant,
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

    def event(
        self, position: int, verdict: Verdict | None, finish_reason: FinishReason | None
    ) -> TokenEvent:
        """The tokens since output `position` as the client's event."""
        if verdict is None:
            return TokenEvent(
                self.request.id,
                position,
                EMPTY_TOKENS,
                finish_reason=finish_reason,
                stats=self.statistics.snapshot() if finish_reason else None,
            )
        token_ids = self.tokens.since(self.prompt_len + position)
        return TokenEvent(
            self.request.id,
            position,
            token_ids,
            verdict.logprobs[: len(token_ids)],
            finish_reason,
            self.statistics.snapshot() if finish_reason else None,
        )
