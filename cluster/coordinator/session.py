"""One request at the coordinator: the copy of its text that failover needs."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.coordinator.replica import Subscription
from cluster.core import EMPTY_TOKENS, FinishReason, Request, TokenEvent
from cluster.errors import CapacityError, DrafthouseError
from cluster.messages import Open, PoolTree, TextVerdict
from cluster.plan.roster import lot_of
from cluster.plan.texts import MAX_DRAFTERS, NO_SOURCES, Text
from cluster.requests.plain_why import PlainWhy
from cluster.requests.redraw import Redraw
from cluster.requests.step_count import StepCount
from cluster.spec.acceptance import group_of
from cluster.spec.statistics import TextStatistics
from cluster.spec.token_log import TokenLog

Deliver = Callable[[TokenEvent], None]


_NOTHING_SAID = TextVerdict("", 0, 0, EMPTY_TOKENS, NO_SOURCES)


class Status(enum.StrEnum):
    WAITING = "waiting"  # admitted, has no place at a target
    RUNNING = "running"  # a target runs it
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that end a text, besides its own stop tokens.

    max_context_len: prompt and output together, 0 = unknown.  vocab_size: 0 = unknown.
    """

    max_context_len: int = 0
    vocab_size: int = 0


class Seat(Protocol):
    """The target that runs a session, as far as the session's drafters are concerned.

    residents: names of the drafters that run inside it.
    """

    id: str
    devices: frozenset[str]
    residents: tuple[str, ...]

    @property
    def num_sessions(self) -> int: ...
    def tell(self, tree: PoolTree) -> None: ...
    def left_alone(self) -> list[str]: ...


class Session(Text):
    """The coordinator's copy of one request."""

    def __init__(
        self, session_id: str, request: Request, deliver: Deliver, arrival: int, now: float
    ) -> None:
        resumed = np.concatenate([request.prompt_ids, request.output_ids])
        tokens = TokenLog(resumed, len(resumed) + min(request.params.max_tokens, 1024))
        # The id is unique at this coordinator: the wire's request id.
        params = request.params
        super().__init__(session_id, group_of(params, request.task, request.adapter), tokens)
        self.is_coupled = params.is_coupled
        self.lot = lot_of(session_id)
        self.request = request
        self.deliver = deliver
        self.arrival = arrival
        self.arrived_at = now
        self.shunned_target = ""  # the one that failed it last
        self.is_audit = False  # its text is another one's, and nothing of it is counted
        self.redraws: list[Redraw] = []  # of an audit
        self.last_event_at: float | None = None
        self.prompt_len = len(request.prompt_ids)
        self.status = Status.WAITING
        self.generation = 0
        self.target: Seat | None = None
        self.opened_serial = 0  # of the frame that opened it there; 0 = not sent yet
        self.has_answered = False  # that target has said something of it
        self.num_retries = 0  # worker errors since the last verdict
        self.num_reopened = 0  # times that its target had lost it since then
        self.drafters: tuple[str, ...] = ()
        # Drafters that declined this request, and until when they are not asked again.
        self.declined: dict[str, float] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.statistics = TextStatistics()
        self.idle_because = ""  # once it has ended: why, if it had no step with drafts
        self.first_at: float | None = None  # of its verdicts
        self.last_at = 0.0
        self.plain_steps: Counter[PlainWhy] = Counter()
        self.queue_time_s: float | None = None  # until its first place at a target
        self.num_cached = 0  # tokens of the prompt, when it first came
        self._max_len = self.prompt_len + request.params.max_tokens
        self._is_limited = False

    @property
    def prefill_time_s(self) -> float:
        """From its first place at a target to its first tokens, 0 before them."""
        if self.first_at is None:
            return 0.0
        return self.first_at - self.arrived_at - (self.queue_time_s or 0.0)

    @property
    def decode_time_s(self) -> float:
        """From its first verdict to its last."""
        return 0.0 if self.first_at is None else self.last_at - self.first_at

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    def limit(self, limits: Limits) -> None:
        """Fix where its text ends, once: by the context limit of that time."""
        if limits.max_context_len and not self._is_limited:
            self._max_len = min(self._max_len, limits.max_context_len)
            self._is_limited = True

    @property
    def remaining(self) -> int:
        """How many more tokens there may be."""
        return self._max_len - len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """True if the output is given, and only its log-probabilities are asked for."""
        return len(self.request.params.forced_ids) > 0

    @property
    def is_drawn(self) -> bool:
        """True if the target draws its tokens: it is neither scored nor searched for."""
        return not self.is_scored and self.request.params.beams is None

    def help_by(self, drafters: tuple[str, ...]) -> None:
        """These may draft for it."""
        self.drafters = self.names = drafters[:MAX_DRAFTERS]

    def opened(self) -> Open:
        """Return what its target is told, once: all of it."""
        tokens, request = self.tokens, self.request
        return Open(
            self.id, self.generation, tokens.token_ids.copy(), tokens.hash_at(len(tokens)),
            self.prompt_len, request.params, self._max_len, request.task, request.tenant,
            request.adapter, self.names, self.max_draft_tokens,
            request.speculation.latency_class or "",
            request.speculation.return_draft_trees and self.is_drawn, self.is_audit,
        )  # fmt: skip

    def count(self, verdict: TextVerdict, now: float) -> None:
        """Enter a verdict into its statistics."""
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        self.statistics.take([self._step(verdict)], len(verdict.token_ids))

    def _step(self, verdict: TextVerdict) -> StepCount:
        counts = zip(self.names, verdict.verified, strict=False)
        verified = {name: count for name, count in counts if count}
        return StepCount(self._sources(verdict), verdict.num_nodes, verified, self.decode_time_s)

    def event(
        self, position: int, verdict: TextVerdict | None, finish_reason: FinishReason | None
    ) -> TokenEvent:
        """The tokens of a verdict, which begin at output `position`, as the client's event."""
        said = verdict or _NOTHING_SAID
        return TokenEvent(
            self.request.id, position, said.token_ids, said.logprobs, finish_reason,
            self.statistics.snapshot(self.idle_because) if finish_reason else None,
            draft_sources=self._sources(said)
            if self.request.speculation.return_draft_sources
            else (),
            queue_time_s=(self.queue_time_s or 0.0) if finish_reason else 0.0,
            prefill_time_s=self.prefill_time_s if finish_reason else 0.0,
            num_cached=self.num_cached, beams=said.beams,
            draft_steps=() if said.step is None else (said.step,),
            steps=(self._step(said),) if verdict and self.request.counts_steps else (),
        )  # fmt: skip

    def _sources(self, verdict: TextVerdict) -> tuple[tuple[str, ...], ...]:
        """Of each token, which drafters had proposed it; () for one of the target's own."""
        num_tokens, names = len(verdict.token_ids), list(enumerate(self.names))
        found = [
            # The one that it counts for goes first.
            (
                self.names[owner],
                *(name for place, name in names if bits >> place & 1 and place != owner),
            )
            for bits, owner in zip(
                verdict.sources[:num_tokens].tolist(), verdict.owners, strict=False
            )
        ]
        return (*found, *[()] * (num_tokens - len(found)))


def error_event(
    request_id: str, error: DrafthouseError, session: Session | None = None
) -> TokenEvent:
    """The last event of a request that ends with `error`."""
    return TokenEvent(
        request_id=request_id,
        position=session.num_output_tokens if session else 0,
        token_ids=EMPTY_TOKENS,
        finish_reason=FinishReason.ERROR,
        stats=session.statistics.snapshot(session.idle_because) if session else None,
        queue_time_s=(session.queue_time_s or 0.0) if session else 0.0,
        error_code=error.code,
        error_message=error.message,
        retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else 0.0,
    )
