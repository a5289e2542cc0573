"""One request at the coordinator: the copy of its text that failover needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cluster.core import Request, TokenEvent
from cluster.plan.roster import lot_of
from cluster.plan.texts import Text
from cluster.requests.fields import PlainWhy, Redraw, StepCount
from cluster.rpc.messages import Open, TextName, TextVerdict
from cluster.spec.acceptance import group_of
from cluster.spec.statistics import TextStatistics
from cluster.spec.token_log import TokenLog

Deliver = Callable[[TokenEvent], None]
# So often in a row a target or a drafter may have lost a text, since a link may lose frames too;
# beyond that it is no place for the text.
MAX_LOST_IN_A_ROW = 8


@dataclass(slots=True, eq=False)
class Session:
    """The coordinator's copy of one request.

    id: unique at this coordinator, and the wire's request id.  shunned_target: the one that failed
    it last.  is_audit: its text is another one's, and nothing of it is counted; redraws: of an
    audit.  target_id: that runs it; "" = it has no place, or is over.  opened_serial: of the frame
    that opened it there, 0 = not sent yet; has_answered: that target has said something of it.
    num_retries: worker errors since the last verdict; num_reopened: times that its target had lost
    it since then.  declined: drafters that declined it, and until when they are not asked again.
    idle_because: once it has ended, why, if it had no step with drafts.  last_at: of its verdicts.
    queue_time_s: until its first place at a target; prefill_time_s: from there to its first tokens;
    decode_time_s: from these to its last.  num_cached: tokens of the prompt, when it first came.
    text: what the control loop sees of it.
    """

    id: str
    request: Request
    deliver: Deliver
    arrived_at: float
    shunned_target: str = ""
    is_audit: bool = False
    redraws: list[Redraw] = field(default_factory=list)
    is_over: bool = False
    generation: int = 0
    target_id: str = ""
    opened_serial: int = 0
    has_answered: bool = False
    num_retries: int = 0
    num_reopened: int = 0
    declined: dict[str, float] = field(default_factory=dict)
    subscriptions: dict[str, Any] = field(default_factory=dict)  # whose module needs this one
    statistics: TextStatistics = field(default_factory=TextStatistics)
    idle_because: str = ""
    last_at: float | None = None
    plain_steps: Counter[PlainWhy] = field(default_factory=Counter)
    queue_time_s: float = 0.0
    prefill_time_s: float = 0.0
    decode_time_s: float = 0.0
    num_cached: int = 0
    text: Text = field(init=False)
    tokens: TokenLog = field(init=False)
    max_len: int = field(init=False)

    def __post_init__(self) -> None:
        request, params = self.request, self.request.params
        self.tokens = TokenLog(np.concatenate([request.prompt_ids, request.output_ids]))
        self.max_len = self.prompt_len + params.max_tokens
        group = group_of(params, request.task, request.adapter)
        self.text = Text(self.id, group, self.tokens)
        self.text.is_coupled = params.is_coupled
        self.text.lot = lot_of(self.id)

    @property
    def name(self) -> TextName:
        """As its target is told, with its present owner."""
        return TextName(self.id, self.generation)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    def limit(self, max_context_len: int) -> None:
        """Let its text end by the context limit, 0 = unknown, until it has its first place: else it
        would be another text after a failover."""
        if max_context_len and not self.generation:
            self.max_len = min(self.max_len, max_context_len)

    @property
    def remaining(self) -> int:
        """How many more tokens there may be."""
        return self.max_len - len(self.tokens)

    @property
    def is_scored(self) -> bool:
        """True if the output is given, and only its log-probabilities are asked for."""
        return len(self.request.params.forced_ids) > 0

    @property
    def is_drawn(self) -> bool:
        """True if the target draws its tokens: it is neither scored nor searched for."""
        return not self.is_scored and self.request.params.beams is None

    def opened(self) -> Open:
        """Return what its target is told, once: all of it."""
        tokens, request = self.tokens, self.request
        return Open(
            self.id,
            self.generation,
            tokens.token_ids.copy(),
            tokens.hash_at(len(tokens)),
            self.prompt_len,
            request.params,
            self.max_len,
            request.task,
            request.tenant,
            request.adapter,
            self.text.names,
            self.text.max_draft_tokens,
            request.speculation.latency_class or "",
            request.speculation.return_draft_trees and self.is_drawn,
            self.is_audit,
        )

    def count(self, verdict: TextVerdict, now: float) -> StepCount:
        """Enter a verdict into its statistics; returns what it counts."""
        if self.last_at is None:
            self.prefill_time_s = now - self.arrived_at - self.queue_time_s
        else:
            self.decode_time_s += now - self.last_at
        self.last_at = now
        counts = zip(self.text.names, verdict.verified, strict=False)
        verified = {name: count for name, count in counts if count}
        step = StepCount(self._sources(verdict), verdict.num_nodes, verified, self.decode_time_s)
        self.statistics.take([step], len(verdict.token_ids))
        for name, own in self.subscriptions.items():
            own.num_unused = 0 if name in verified else own.num_unused + 1
        self.plain_steps[verdict.why] += 1
        return step

    def event(self, verdict: TextVerdict, step: StepCount | None) -> TokenEvent:
        """The tokens of a verdict as the client's event.  step: of `count`."""
        event = TokenEvent(
            self.request.id,
            verdict.context_len - self.prompt_len,
            verdict.token_ids,
            verdict.logprobs,
            verdict.finish_reason,
            draft_sources=(
                step.sources if step and self.request.speculation.return_draft_sources else ()
            ),
            num_cached=self.num_cached,
            beams=verdict.beams,
            draft_steps=() if verdict.step is None else (verdict.step,),
            steps=(step,) if step and self.request.counts_steps else (),
        )
        return event if event.finish_reason is None else self.last(event)

    def last(self, event: TokenEvent) -> TokenEvent:
        """Return the last event with what it tells of the whole text."""
        return replace(
            event,
            stats=self.statistics.snapshot(self.idle_because),
            queue_time_s=self.queue_time_s,
            prefill_time_s=self.prefill_time_s,
            num_cached=self.num_cached,
        )

    def _sources(self, verdict: TextVerdict) -> tuple[tuple[str, ...], ...]:
        """Of each token, which drafters had proposed it; () for one of the target's own."""
        num_tokens, names = len(verdict.token_ids), self.text.names
        found = [
            # The one that it counts for goes first.
            (
                names[owner],
                *(name for place, name in enumerate(names) if bits >> place & 1 and place != owner),
            )
            for bits, owner in zip(
                verdict.sources[:num_tokens].tolist(), verdict.owners, strict=False
            )
        ]
        return (*found, *[()] * (num_tokens - len(found)))
