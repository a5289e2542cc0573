"""One request at the coordinator: its tokens are the truth, every cache elsewhere is a guess."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cluster.coordinator.statistics import RequestStatistics
from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    FinishReason,
    FloatArray,
    Request,
    TokenArray,
    TokenEvent,
    TokenTree,
    Verdict,
    VerifyItem,
)
from cluster.records import record
from cluster.spec.forest import Forest
from cluster.spec.guard import DeficitGuard
from cluster.spec.reach import Reach
from cluster.token_log import TokenLog

if TYPE_CHECKING:
    from cluster.coordinator.replica import DrafterReplica
    from cluster.coordinator.targets import TargetSeat

_NO_CLAIMS: FloatArray = np.empty((0, 0), dtype=np.float32)
_NO_CLAIMS.setflags(write=False)

Deliver = Callable[[TokenEvent], None]
Group = tuple[str, bool]  # task class; sampled, or greedy


class Status(enum.StrEnum):
    WAITING = "waiting"  # admitted, has no place at a target
    PREFILL = "prefill"  # a target must first be sent, or is computing, a longer delta
    READY = "ready"  # the target holds all but the last token; joins the next batch
    DECODING = "decoding"  # in the batch the target is working on
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Place:
    """Where a tree stands in the arrays of a batch.

    claimed, calibrated: float32[n], survivals of all the forest's nodes.
    """

    forest: Forest
    claimed: FloatArray
    calibrated: FloatArray
    index: int


@dataclass(slots=True, eq=False)
class HeldTree:
    """The newest tree of one drafter; it continues the first `base_len` tokens.

    proposed_len: base_len as proposed, before any re-rooting; orders proposals that overtook
    each other.  calibrated: the claimed survivals after calibration, None = not yet done.
    checked: the tree is known to be sound; it may be used only then.
    place: what is left of it after the last batch, which mostly is replaced before the next one.
    """

    base_len: int
    proposed_len: int
    tree: TokenTree
    survival: FloatArray
    calibrated: FloatArray | None = None
    checked: bool = False
    place: Place | None = None

    def settle(self) -> None:
        """Take what is left of the tree out of the arrays of the last batch."""
        place, self.place = self.place, None
        if place is not None:
            nodes = place.forest.span(place.index)
            self.tree = place.forest.tree(place.index)
            self.survival, self.calibrated = place.claimed[nodes], place.calibrated[nodes]


@dataclass(slots=True, eq=False)
class Growth:
    """What followed the last commit at one drafter.

    is_hit: whether a part of its former tree outlived the commit, None = not looked at yet.
    is_learned: it is one of the commits that the price list of waiting is learned from.
    trees: of these, (seconds since the commit, tree, claimed survivals) in order of arrival.
    at_hand: the calibrated survivals of what outlived the commit.
    is_complete: nothing else comes.
    """

    committed_at: float
    context_len: int
    is_learned: bool
    is_answered: bool = False
    is_complete: bool = False
    is_hit: bool | None = None
    at_hand: FloatArray | None = None
    trees: list[tuple[float, TokenTree, FloatArray]] = field(default_factory=list)

    def look(self, proposed_len: int | None, at_hand: FloatArray | None = None) -> None:
        """Take note of the tree at hand, when it is that of before the commit.

        proposed_len: of that tree, None = there is none.  at_hand: its calibrated survivals.
        """
        if self.is_hit is None and (proposed_len is None or proposed_len < self.context_len):
            self.is_hit, self.at_hand = proposed_len is not None, at_hand


@dataclass(slots=True)
class Subscription:
    """What one drafter replica has been told of a session, and what it answered.

    sent_len: tokens it has been sent.  base_len, generation: of the last commit, None before the
    first.  expected: lengths at the ends of commits that it has not answered yet.
    num_shortages: answers in a row that asked for tokens again.
    """

    replica: DrafterReplica
    sent_len: int = 0
    base_len: int | None = None
    generation: int | None = None
    num_shortages: int = 0
    expected: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    held: HeldTree | None = None
    growth: Growth | None = None  # None: nobody waits for drafts
    log_loss: float | None = None  # running mean of what the drafter reports on commits


@record(frozen=True, slots=True, eq=False)
class InFlight:
    """The item a target is working on for a session, and where its tree came from.

    num_proposed: how many of the nodes each of the drafters proposed.
    claimed: float32[k, n], k at least as many as drafters; row i: the survival that drafters[i]
    claimed for each node, NaN where it did not propose it.
    """

    context_len: int
    tree: TokenTree = EMPTY_TREE
    drafters: tuple[str, ...] = ()
    num_proposed: tuple[int, ...] = ()
    claimed: FloatArray = field(default_factory=lambda: _NO_CLAIMS)

    def num_accepted(self, path: TokenArray | Sequence[int]) -> tuple[int, ...]:
        """How many nodes of the accepted `path` each of the drafters had proposed."""
        if len(self.drafters) <= 1:
            return (len(path),) * len(self.drafters)
        claims = self.claimed[: len(self.drafters), path]
        return tuple((claims == claims).sum(axis=1).tolist())  # NaN is not itself


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a text besides its own stop tokens.

    max_context_len: prompt and output together, 0 = unknown.  vocab_size: 0 = unknown.
    """

    max_context_len: int = 0
    vocab_size: int = 0


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
        self.target: TargetSeat | None = None
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
        self.reach = Reach()  # where the budget is adaptive
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
