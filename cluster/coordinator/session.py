"""One request at the coordinator: its tokens are the truth, every cache elsewhere is a guess."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cluster.coordinator.statistics import RequestStatistics
from cluster.core import (
    EMPTY_TOKENS,
    EMPTY_TREE,
    PREFIX_HASH_MULTIPLIER,
    FinishReason,
    FloatArray,
    Request,
    TokenArray,
    TokenEvent,
    TokenTree,
    Verdict,
    VerifyItem,
    prefix_hashes,
)
from cluster.spec.guard import DeficitGuard

if TYPE_CHECKING:
    from cluster.coordinator.replica import DrafterReplica
    from cluster.coordinator.targets import TargetSeat

_MASK64 = (1 << 64) - 1

_NO_SOURCES: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
_NO_SOURCES.setflags(write=False)

Deliver = Callable[[TokenEvent], None]


class Status(enum.StrEnum):
    WAITING = "waiting"  # admitted, has no place at a target
    PREFILL = "prefill"  # a target must first be sent, or is computing, a longer delta
    READY = "ready"  # the target holds all but the last token; joins the next batch
    DECODING = "decoding"  # in the batch the target is working on
    FINISHED = "finished"


class TokenLog:
    """The committed tokens of a sequence with the poly64 hash at every length.

    Append-only, so views handed out stay valid and unchanged for ever.
    """

    def __init__(self, token_ids: TokenArray, capacity: int) -> None:
        self._len = len(token_ids)
        capacity = max(capacity, self._len, 1)
        self._tokens = np.empty(capacity, dtype=np.int32)
        self._hashes = np.zeros(capacity + 1, dtype=np.uint64)
        self._tokens[: self._len] = token_ids
        self._hashes[1 : self._len + 1] = prefix_hashes(self._tokens[: self._len])
        self._last_hash = int(self._hashes[self._len])

    def __len__(self) -> int:
        return self._len

    def append(self, token_ids: TokenArray) -> None:
        end = self._len + len(token_ids)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[self._len : end] = token_ids
        value = self._last_hash
        for index, token in enumerate(token_ids.tolist(), start=self._len + 1):
            value = (value * PREFIX_HASH_MULTIPLIER + token + 1) & _MASK64
            self._hashes[index] = value
        self._last_hash = value
        self._len = end

    def since(self, start: int, stop: int | None = None) -> TokenArray:
        """The tokens [start, stop) as a view; stop None = all there are."""
        return self._tokens[start : self._len if stop is None else min(stop, self._len)]

    def hash_at(self, length: int) -> int:
        """poly64 of the first `length` tokens."""
        return int(self._hashes[length])

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * len(self._tokens))
        tokens = np.empty(capacity, dtype=np.int32)
        hashes: npt.NDArray[np.uint64] = np.zeros(capacity + 1, dtype=np.uint64)
        tokens[: self._len] = self._tokens[: self._len]
        hashes[: self._len + 1] = self._hashes[: self._len + 1]
        self._tokens, self._hashes = tokens, hashes


@dataclass(slots=True)
class HeldTree:
    """The newest tree of one drafter; it continues the first `base_len` tokens.

    proposed_len: base_len as proposed, before any re-rooting; orders proposals that overtook
    each other.  calibrated: the claimed survivals after calibration, None = not yet done.
    checked: the tree is known to be sound; it may be used only then.
    """

    base_len: int
    proposed_len: int
    tree: TokenTree
    survival: FloatArray
    calibrated: FloatArray | None = None
    checked: bool = False


@dataclass(slots=True, eq=False)
class Growth:
    """What followed the last commit at one drafter.

    is_hit: whether a part of its former tree outlived the commit, None = not looked at yet.
    is_learned: it is one of the commits that the price list of waiting is learned from.
    trees: of these, (seconds since the commit, tree, claimed survivals) in order of arrival.
    at_hand: the calibrated survivals of what outlived the commit.
    """

    committed_at: float
    context_len: int
    is_learned: bool
    is_answered: bool = False
    is_hit: bool | None = None
    at_hand: FloatArray | None = None
    trees: list[tuple[float, TokenTree, FloatArray]] = field(default_factory=list)

    def look(self, held: HeldTree | None) -> None:
        """Take note of the tree at hand, when it is that of before the commit."""
        if self.is_hit is not None or (held is not None and held.proposed_len >= self.context_len):
            return
        self.is_hit = held is not None
        self.at_hand = held.calibrated if held is not None else None


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


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What one drafter offered for a step: its reachable tree and the survivals it claims."""

    drafter: str
    tree: TokenTree
    survival: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The item a target is working on for a session, and where its tree came from.

    sources: uint64[n], bit i = the tree of claims[i] held the node.
    """

    context_len: int
    tree: TokenTree = EMPTY_TREE
    sources: npt.NDArray[np.uint64] = field(default_factory=lambda: _NO_SOURCES)
    claims: tuple[Claim, ...] = ()


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
        self.last_event_at: float | None = None
        self.prompt_len = len(request.prompt_ids)
        resumed = np.concatenate([request.prompt_ids, request.output_ids])
        self.tokens = TokenLog(resumed, len(resumed) + min(request.params.max_tokens, 1024))
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
        self.subscriptions: dict[str, Subscription] = {}
        self.statistics = RequestStatistics()
        self.guard: DeficitGuard | None = None  # what its drafts may cost

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def group(self) -> tuple[str, bool]:
        """What makes batches homogeneous: the task class, and whether it is sampled."""
        return self.request.task, self.request.params.temperature > 0.0

    def remaining_tokens(self, limits: Limits) -> int:
        """How many more tokens may be emitted."""
        remaining = self.request.params.max_tokens - self.num_output_tokens
        if limits.max_context_len:
            remaining = min(remaining, limits.max_context_len - len(self.tokens))
        return remaining

    def item(self, tree: TokenTree) -> VerifyItem:
        """The next item for the target: what its cache lacks, and `tree` after that."""
        params = self.request.params if self.sends_params or self.target_len == 0 else None
        self.sends_params = False
        return VerifyItem(
            request_id=self.id,
            generation=self.generation,
            base_len=self.target_len,
            prefix_hash=self.tokens.hash_at(self.target_len),
            delta=self.tokens.since(self.target_len),
            tree=tree,
            prompt_len=self.prompt_len,
            params=params,
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
        token_ids = self.tokens.since(self.prompt_len + position) if verdict else EMPTY_TOKENS
        return TokenEvent(
            request_id=self.request.id,
            position=position,
            token_ids=token_ids,
            logprobs=verdict.logprobs[: len(token_ids)] if verdict else (),
            finish_reason=finish_reason,
            stats=self.statistics.snapshot() if finish_reason else None,
        )
