"""What the budget is told and what it answers: plain records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_FLOATS, FloatArray, TokenArray
from cluster.records import record
from cluster.spec.forest import Floats, Indices, Mask, ranked
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_profile import StepProfile
from cluster.spec.step_times import EDGES

Gains = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDraft:
    """What one sequence of the batch offers.

    survival: float32[n], calibrated, not increasing along a path (`tree.monotone`); parents stand
    before children.  weight: of its service class.  max_nodes: its own cap.  guard: its own
    account.  arriving: float64[waits, ranks], the survivals it is expected to have after each
    wait, best first; None = nothing more is to be expected.
    """

    survival: FloatArray
    weight: float = 1.0
    max_nodes: int | None = None
    guard: DeficitGuard | None = None
    arriving: Gains | None = None


@record(frozen=True, slots=True, eq=False)
class BatchDrafts:
    """What the sequences of a batch offer, as arrays.

    nodes: int64[n], places in the batch's forest, sequence by sequence, each one's best first;
    owners, ranks, survival: of these, int64[n], int64[n] and float64[n].
    weights: float64[sequences].  caps: int64[sequences].  guards: their own accounts.
    arriving: float64[sequences, waits, ranks] as in `SequenceDraft`, where is_arriving:
    bool[sequences]; None = nothing more is to be expected of any.
    """

    nodes: Indices
    owners: Indices
    ranks: Indices
    survival: Floats
    weights: Floats
    caps: Indices
    guards: Sequence[DeficitGuard | None]
    arriving: Gains | None = None
    is_arriving: Mask | None = None

    def __len__(self) -> int:
        return len(self.weights)

    def gains(self, is_counted: Mask) -> Gains:
        """The weighted gains of the nodes that count, which are each sequence's best: float64[m].

        See `cluster.spec.budget`.
        """
        owners, ranks = self.owners[is_counted], self.ranks[is_counted]
        survival = np.zeros((len(self), int(ranks.max(initial=0)) + 1))
        survival[owners, ranks] = self.survival[is_counted]
        return np.asarray(marginal_gains(survival)[owners, ranks] * self.weights[owners])

    def profiles(self, num_ranks: int) -> Floats:
        """Each sequence's best survivals, zeros after them: float64[sequences, num_ranks]."""
        best = np.zeros((len(self), num_ranks))
        is_best = self.ranks < num_ranks
        best[self.owners[is_best], self.ranks[is_best]] = self.survival[is_best]
        return best


def marginal_gains(survival: Gains) -> Gains:
    """What each of a sequence's nodes adds to the logarithm of the tokens it is expected to emit.

    survival: float64[..., nodes], each sequence's best first.  Not increasing either, to the bit.
    """
    before = np.ones(survival.shape)
    before[..., 1:] += survival[..., :-1].cumsum(axis=-1)
    return np.minimum.accumulate(np.log1p(survival / before), axis=-1)


def rank_drafts(
    survival: FloatArray,
    owners: Indices,
    starts: Indices,
    caps: Sequence[int],
    guards: Sequence[DeficitGuard | None],
) -> BatchDrafts:
    """The drafts of a forest, all of weight 1, without expected arrivals.

    survival, owners, starts: as in `forest.Forest`.
    """
    nodes, ranks = ranked(survival, owners, starts)
    values = np.where(survival > 0.0, survival, 0.0).astype(np.float64)[nodes]
    return BatchDrafts(
        nodes, owners, ranks, values, np.ones(len(caps)), np.array(caps, dtype=np.int64), guards
    )


def pack(batch: Sequence[SequenceDraft], max_nodes: int) -> BatchDrafts:
    """The drafts of single sequences as a batch; max_nodes: the cap of those without their own."""
    counts = [len(draft.survival) for draft in batch]
    starts = np.zeros(len(batch) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    survival = np.concatenate([draft.survival for draft in batch] or [EMPTY_FLOATS])
    caps = [max_nodes if draft.max_nodes is None else draft.max_nodes for draft in batch]
    found = rank_drafts(
        survival, np.repeat(np.arange(len(batch)), counts), starts, caps,
        [draft.guard for draft in batch],
    )  # fmt: skip
    is_arriving = np.array([draft.arriving is not None for draft in batch], dtype=np.bool_)
    arriving: Gains | None = None
    if is_arriving.any():
        given = [draft.arriving for draft in batch if draft.arriving is not None]
        arriving = np.zeros((len(batch), *given[0].shape))
        arriving[is_arriving] = given
    weights = np.array([draft.weight for draft in batch])
    return replace(found, weights=weights, arriving=arriving, is_arriving=is_arriving)


@record(frozen=True, slots=True)
class Share:
    """One sequence's part in a finished round.

    num_tokens: plain steps that the emitted tokens would have taken.  is_awaited: the round began
    late for the sake of its drafts.
    """

    num_nodes: int
    num_tokens: int
    guard: DeficitGuard | None = None
    is_awaited: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """nodes: for each sequence the nodes to verify, ascending indices, closed under parents.

    wait_s > 0: better wait so long first, for the sequences whose indices are in `awaited`.
    """

    nodes: list[TokenArray]
    wait_s: float = 0.0
    awaited: tuple[int, ...] = ()


@record(frozen=True, slots=True, eq=False)
class Choice:
    """`Decision` for a batch.  nodes: int64[m], places in its forest, best first.

    is_trial: the wait is to last to its end, to show what comes in it.
    """

    nodes: Indices
    wait_s: float = 0.0
    awaited: tuple[int, ...] = ()
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """What the controller goes by.

    max_draft_tokens: cap per sequence and step.  max_step_nodes: cap of the whole step.
    hysteresis: relative gain that plain decoding must be beaten by before speculation (re)starts,
    and that a wait must promise.
    probe_interval: steps after which a stale measurement is refreshed, per bucket of sequences.
    first_nodes: draft nodes per sequence of the first speculative step, of few sequences.
    max_slowdown, slack_steps: of the guards; the slack is that of one sequence, n have it divided
    by the root of n.
    profile: of the target's steps, as it measured them itself.
    """

    max_draft_tokens: int
    max_step_nodes: int = EDGES[-1]
    hysteresis: float = 0.03
    probe_interval: int = 128
    first_nodes: int = 4
    max_slowdown: float = 0.02
    slack_steps: float = 8.0
    profile: StepProfile | None = None
