"""What a step is expected to give per second, and what the target's account allows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np

from cluster.spec.drafts import BatchDrafts, BudgetRules, Gains, Share
from cluster.spec.forest import Indices
from cluster.spec.guard import DeficitGuard
from cluster.spec.quiet import QuietTimes
from cluster.spec.step_times import EDGES, StepTimes, bucket

# Weight of the newest round in the running rate.
_RATE_WEIGHT = 0.05
# So many rounds with drafters at work tell whether they are worth it: the luck of single rounds
# leaves an error of some 3 %.  A loss so many standard errors below nothing is told sooner.
_STRETCH_ROUNDS = 64
_LOOK_ROUNDS = 16
# Fewer say nothing at all.
_FEWEST_ROUNDS = 8
_BEYOND_DOUBT = 2.3
# A first speculative step of many sequences verifies so many nodes, or one for each.
_FIRST_NODES = 16
_EDGES = np.array(EDGES)


@dataclass(slots=True)
class _Rate:
    """Running sums of rounds, whose ratio is the rate of late."""

    tokens: float = 0.0
    time_s: float = 0.0


@dataclass(slots=True)
class _Stretch:
    """Rounds with drafters at work, whether they verified anything or not.

    plain_s: what plain decoding without drafters would have taken for the same tokens.
    """

    num_rounds: int = 0
    time_s: float = 0.0
    plain_s: float = 0.0
    squares: float = 0.0  # of what single rounds gained, in seconds

    def add(self, time_s: float, plain_s: float) -> None:
        self.num_rounds += 1
        self.time_s += time_s
        self.plain_s += plain_s
        self.squares += (plain_s - time_s) ** 2

    @property
    def tells(self) -> bool:
        """Whether it says what speculation is worth: it is long enough, or a loss beyond doubt."""
        if self.num_rounds >= _STRETCH_ROUNDS:
            return True
        if self.num_rounds == 0 or self.num_rounds % _LOOK_ROUNDS:
            return False
        lost_s = self.time_s - self.plain_s
        spread = max(self.squares - lost_s**2 / self.num_rounds, 0.0)
        return lost_s > _BEYOND_DOUBT * math.sqrt(spread)


@dataclass(slots=True)
class GoodputModel:
    """Step times as measured, rounds as they turned out, and the accounts kept of both.

    sibling: of the same target under another law: a step takes what it takes under either, so step
    times are learned together, and all that depends on how drafts turn out apart.
    """

    rules: BudgetRules
    sibling: InitVar[GoodputModel | None] = None
    times: StepTimes = field(init=False)
    quiet: QuietTimes = field(init=False, default_factory=QuietTimes)
    # By bucket of sequences, as everything that is learned: what a crowd has lost, in steps of a
    # crowd, would keep a lone request from speculating for a long time.
    _guards: dict[int, DeficitGuard] = field(init=False, default_factory=dict)
    _rates: dict[int, _Rate] = field(init=False, default_factory=dict)  # by bucket of sequences
    _stretches: dict[int, _Stretch] = field(init=False, default_factory=dict)  # likewise
    _spells: dict[int, _Stretch] = field(init=False, default_factory=dict)  # likewise
    # Answers for as long as no more steps are recorded: a choice asks for the same some ten times.
    _plain_s: dict[int, float | None] = field(init=False, default_factory=dict)
    _plain_as_of: tuple[int, int] = field(init=False, default=(-1, -1))

    def __post_init__(self, sibling: GoodputModel | None) -> None:
        if sibling is not None:
            self.times, self.quiet = sibling.times, sibling.quiet
            return
        self.times = StepTimes(
            stale_after=self.rules.probe_interval // 2, profile=self.rules.profile
        )

    @property
    def deficit_s(self) -> float:
        """What speculation has lost and not regained, over all loads, in seconds."""
        return sum(guard.deficit_s for guard in self._guards.values())

    def guard(self, num_sequences: int) -> DeficitGuard:
        """The target's account for steps of about so many sequences."""
        key = bucket(num_sequences)
        guard = self._guards.get(key)
        if guard is None:
            # The luck of n sequences together is their root as large, in steps, as that of one.
            slack_steps = self.rules.slack_steps / math.sqrt(max(key, 1))
            guard = self._guards[key] = DeficitGuard(self.rules.max_slowdown, slack_steps)
        return guard

    def rate(self, num_sequences: int) -> float | None:
        """Tokens per second of the last rounds, waits included; None before the first."""
        rate = self._rates.get(bucket(num_sequences))
        return rate.tokens / rate.time_s if rate else None

    def plain_s(self, num_sequences: int) -> float | None:
        """What a plain step takes without drafters, in seconds; None while unmeasured."""
        known = (self.times.num_recorded, self.quiet.num_recorded)
        if known != self._plain_as_of:
            self._plain_as_of = known
            self._plain_s.clear()
        if num_sequences not in self._plain_s:
            usual_s = self.times.estimate(num_sequences, 0)
            self._plain_s[num_sequences] = (
                None if usual_s is None else usual_s * self.quiet_factor(num_sequences)
            )
        return self._plain_s[num_sequences]

    def quiet_factor(self, num_sequences: int) -> float:
        """Plain steps without drafters over those beside them; 1 while that is not known."""
        usual_s = self.times.estimate(num_sequences, 0)
        if usual_s is None or not self.times.is_measured(num_sequences, 0):
            return 1.0  # at most a neighbour's time is known, which says nothing about these
        return self.quiet.factor(num_sequences, usual_s)

    def settle(
        self,
        shares: Sequence[Share],
        round_time_s: float | None,
        waited_s: float,
        *,
        is_quiet: bool | None = False,
    ) -> None:
        """See `BudgetController.settle`."""
        num_sequences = len(shares)
        num_nodes = sum(share.num_nodes for share in shares)
        plain_s = self.plain_s(num_sequences) if shares else None
        time_s = round_time_s or self.times.estimate(num_sequences, num_nodes)
        if plain_s is None or time_s is None:
            return
        if num_nodes == 0:
            # A plain round is its own plain equivalent, slow or not, but for what drafters cost it.
            plain_s = time_s if is_quiet else time_s * self.quiet_factor(num_sequences)
        num_tokens = sum(share.num_tokens for share in shares)
        step_s = plain_s / num_sequences
        self.guard(num_sequences).settle(
            time_s + waited_s, step_s * num_tokens, plain_s, is_plain=num_nodes == 0
        )
        if not is_quiet:
            for rounds in (self._stretches, self._spells):
                stretch = rounds.setdefault(bucket(num_sequences), _Stretch())
                stretch.add(time_s + waited_s, step_s * num_tokens)
        num_awaited = sum(share.is_awaited for share in shares)
        for share in shares:
            if share.guard is None:
                continue
            own_s = step_s
            if share.num_nodes:
                own_s += (time_s - plain_s) * share.num_nodes / num_nodes
            if share.is_awaited:
                own_s += waited_s / num_awaited
            share.guard.settle(
                own_s, step_s * share.num_tokens, step_s, is_plain=share.num_nodes == 0
            )
        rate = self._rates.setdefault(bucket(num_sequences), _Rate())
        rate.tokens += num_tokens - _RATE_WEIGHT * rate.tokens
        rate.time_s += time_s + waited_s - _RATE_WEIGHT * rate.time_s

    def take_gain(self, num_sequences: int) -> float | None:
        """By what factor speculation has been faster than plain decoding, all rounds with drafters
        at work together, since this was last answered; None while those are too few to tell.

        To be asked after every round.  64 rounds tell; at the 16th, 32nd and 48th a loss does that
        the luck of single rounds does not explain.
        """
        stretch = self._stretches.get(bucket(num_sequences))
        if stretch is None or not stretch.tells:
            return None
        del self._stretches[bucket(num_sequences)]
        return stretch.plain_s / stretch.time_s

    def take_spell(self, num_sequences: int) -> float | None:
        """See `BudgetController.take_spell`."""
        spell = self._spells.get(bucket(num_sequences))
        if spell is None or spell.num_rounds < _FEWEST_ROUNDS:
            return None
        del self._spells[bucket(num_sequences)]
        return spell.plain_s / spell.time_s

    def allows(self, num_sequences: int, num_nodes: int, wait_s: float = 0.0) -> bool:
        """Whether the target's account could lose such a round, the wait before it included."""
        step_s = self.plain_s(num_sequences)
        high_s = self.times.high(num_sequences, num_nodes)
        assert step_s is not None  # plain steps are measured by now
        assert high_s is not None
        return self.guard(num_sequences).allows(high_s + wait_s - step_s, step_s)

    def caps(self, batch: BatchDrafts) -> Indices:
        """How many nodes each sequence may get: as many as its own account could lose.

        With that account overdrawn it gets none, and the rounds in which it has an allowance
        again are its probes.  What it could lose is its share, by nodes, of what the step may take
        longer than a plain one, as it is charged: not all of a large batch's jitter.
        Returns int64[sequences].
        """
        num_sequences = len(batch)
        most = self.rules.max_draft_tokens
        found = [min(max(cap, 0), most) for cap in batch.caps.tolist()]
        step_s = self.plain_s(num_sequences)
        if step_s is None:
            return np.array(found, dtype=np.int64)
        counts = np.bincount(batch.owners, minlength=num_sequences).tolist()
        offered = [min(count, cap) for count, cap in zip(counts, found, strict=True)]
        total = min(sum(offered), self.rules.max_step_nodes)
        extras_s: dict[tuple[int, int], float] = {}
        for index, guard in enumerate(batch.guards):
            if guard is None:
                continue
            cap, others = found[index], max(total - offered[index], 0)
            while cap:
                key = (cap, others)
                if key not in extras_s:
                    high_s = self.times.high(num_sequences, cap + others) or step_s
                    extras_s[key] = (high_s - step_s) * cap / (cap + others)
                if guard.allows(extras_s[key], step_s / num_sequences):
                    break
                cap //= 2
            found[index] = cap
        return np.array(found, dtype=np.int64)

    def goodputs(
        self, num_sequences: int, weight: float, gains: Gains, wait_s: float = 0.0
    ) -> dict[int, float]:
        """What is to be made as great as can be, by number of nodes, of gains ranked best first.

        weight: of all sequences.  Untried counts are admitted up to twice the largest tried one,
        so that the cost of a step is found out in doublings.
        """
        limit = min(self._untried_limit(num_sequences), len(gains))
        counts = [edge for edge in EDGES if edge <= limit]
        if limit == len(gains) and counts[-1] != limit:
            counts.append(limit)
        sums = gains.cumsum().tolist()
        totals = [sums[count - 1] if count else 0.0 for count in counts]
        goodputs: dict[int, float] = {}
        for count, total in zip(counts, totals, strict=True):
            time_s = self.times.estimate(num_sequences, count)
            if count == 0:
                time_s = self.plain_s(num_sequences)
            assert time_s is not None  # plain steps are measured, if of other batches
            goodputs[count] = weight * math.exp(total / weight) / (time_s + wait_s)
        return goodputs

    def best_later(
        self, num_sequences: int, weight: float, gains: Gains, waits_s: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """What `goodputs` is at its best after each wait: (number of nodes, goodput) of each.

        gains: float64[waits, n], ranked best first; a zero is no node.  The number of nodes is
        rounded up to an edge, which takes the same time; of equally good ones it is the smallest.
        """
        limit = self._untried_limit(num_sequences)
        edges = _EDGES[: bisect.bisect_left(EDGES, limit) + 1]
        num_gains = (gains > 0.0).sum(axis=1)[:, np.newaxis]
        totals = np.zeros((len(gains), gains.shape[1] + 1))
        gains.cumsum(axis=1, out=totals[:, 1:])
        totals = totals[:, np.minimum(edges, gains.shape[1])]
        times_s = self.times.at_edges(num_sequences)
        assert times_s is not None  # plain steps are measured, if of other batches
        tokens = weight * np.exp(totals / weight)
        found = tokens / (times_s[: len(edges)] + np.array(waits_s)[:, np.newaxis])
        # Untried counts beyond the limit only where there are no more nodes than that.
        found[(edges > limit) & (num_gains > limit)] = -1.0
        best = found.argmax(axis=1)
        return edges[best].tolist(), found[np.arange(len(found)), best].tolist()

    def _untried_limit(self, num_sequences: int) -> int:
        if self.rules.profile is not None:  # what they cost is known, but for a factor
            return max(
                2 * self.times.frontier(num_sequences), self.rules.first_nodes * num_sequences
            )
        # At most one for each of many: where they are dear, four of each would hold up all streams.
        first = min(self.rules.first_nodes * num_sequences, max(num_sequences, _FIRST_NODES))
        return max(2 * self.times.frontier(num_sequences), first)
