"""What a step is expected to give per second, and what the target's account allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.spec.drafts import BudgetRules, Gains, SequenceDraft, Share
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_times import EDGES, StepTimes, bucket

# Weight of the newest round in the running rate.
_RATE_WEIGHT = 0.05


@dataclass(slots=True)
class _Rate:
    """Running sums of rounds, whose ratio is the rate of late."""

    tokens: float = 0.0
    time_s: float = 0.0


@dataclass(slots=True)
class GoodputModel:
    """Step times as measured, rounds as they turned out, and the accounts kept of both."""

    rules: BudgetRules
    times: StepTimes = field(init=False)
    guard: DeficitGuard = field(init=False)
    _rates: dict[int, _Rate] = field(init=False, default_factory=dict)  # by bucket of sequences

    def __post_init__(self) -> None:
        self.times = StepTimes(stale_after=self.rules.probe_interval // 2)
        self.guard = DeficitGuard(self.rules.max_slowdown, self.rules.slack_steps)

    def rate(self, num_sequences: int) -> float | None:
        """Tokens per second of the last rounds, waits included; None before the first."""
        rate = self._rates.get(bucket(num_sequences))
        return rate.tokens / rate.time_s if rate else None

    def settle(self, shares: Sequence[Share], round_time_s: float | None, waited_s: float) -> None:
        """See `BudgetController.settle`."""
        num_sequences = len(shares)
        num_nodes = sum(share.num_nodes for share in shares)
        plain_s = self.times.estimate(num_sequences, 0) if shares else None
        time_s = round_time_s or self.times.estimate(num_sequences, num_nodes)
        if plain_s is None or time_s is None:
            return
        if num_nodes == 0:
            plain_s = time_s  # a plain round is its own plain equivalent, slow or not
        num_tokens = sum(share.num_tokens for share in shares)
        step_s = plain_s / num_sequences
        self.guard.settle(time_s + waited_s, step_s * num_tokens, plain_s)
        num_awaited = sum(share.is_awaited for share in shares)
        for share in shares:
            if share.guard is None:
                continue
            own_s = step_s
            if share.num_nodes:
                own_s += (time_s - plain_s) * share.num_nodes / num_nodes
            if share.is_awaited:
                own_s += waited_s / num_awaited
            share.guard.settle(own_s, step_s * share.num_tokens, step_s)
        rate = self._rates.setdefault(bucket(num_sequences), _Rate())
        rate.tokens += num_tokens - _RATE_WEIGHT * rate.tokens
        rate.time_s += time_s + waited_s - _RATE_WEIGHT * rate.time_s

    def allows(self, num_sequences: int, num_nodes: int, wait_s: float = 0.0) -> bool:
        """Whether the target's account could lose such a round, the wait before it included."""
        step_s = self.times.estimate(num_sequences, 0)
        high_s = self.times.high(num_sequences, num_nodes)
        assert step_s is not None  # plain steps are measured by now
        assert high_s is not None
        return self.guard.allows(high_s + wait_s - step_s, step_s)

    def cap(
        self, draft: SequenceDraft, num_sequences: int, extras_s: dict[int, float] | None = None
    ) -> int:
        """How many nodes a sequence may get: as many as its own account could lose.

        With that account overdrawn it gets none, and the rounds in which it has an allowance
        again are its probes.  extras_s: what was looked up for others of the batch.
        """
        cap = self.rules.max_draft_tokens
        if draft.max_nodes is not None:
            cap = max(min(cap, draft.max_nodes), 0)
        step_s = self.times.estimate(num_sequences, 0)
        if draft.guard is None or step_s is None:
            return cap
        extras_s = {} if extras_s is None else extras_s
        while cap:
            if cap not in extras_s:
                extras_s[cap] = (self.times.high(num_sequences, cap) or step_s) - step_s
            if draft.guard.allows(extras_s[cap], step_s / num_sequences):
                break
            cap //= 2
        return cap

    def goodputs(
        self, num_sequences: int, weight: float, gains: Gains, wait_s: float = 0.0
    ) -> dict[int, float]:
        """Expected weighted tokens per second by number of nodes, of gains ranked best first.

        weight: of all sequences.  Untried counts are admitted up to twice the largest tried one,
        so that the cost of a step is found out in doublings.
        """
        first = self.rules.first_nodes * num_sequences
        limit = min(max(2 * self.times.frontier(num_sequences), first), len(gains))
        counts = [edge for edge in EDGES if edge <= limit]
        if limit == len(gains) and counts[-1] != limit:
            counts.append(limit)
        totals = np.concatenate(([0.0], np.cumsum(gains)))
        goodputs: dict[int, float] = {}
        for count in counts:
            time_s = self.times.estimate(num_sequences, count)
            assert time_s is not None  # plain steps are measured, if of other batches
            goodputs[count] = (weight + float(totals[count])) / (time_s + wait_s)
        return goodputs
