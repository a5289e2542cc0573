"""What the budget is told and what it answers: plain records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenArray
from cluster.spec.guard import DeficitGuard
from cluster.spec.step_times import EDGES

Gains = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceDraft:
    """What one sequence of the batch offers.

    survival: float32[n], calibrated, not increasing along a path (`tree.monotone`); parents stand
    before children.  weight: of its service class.  max_nodes: its own cap.  guard: its own
    account.  promised: float64[waits, ranks], the survivals it is expected to have after each
    wait, best first; None = nothing more is to be expected.
    """

    survival: FloatArray
    weight: float = 1.0
    max_nodes: int | None = None
    guard: DeficitGuard | None = None
    promised: Gains | None = None


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class BudgetRules:
    """What the controller goes by.

    max_draft_tokens: cap per sequence and step.  max_step_nodes: cap of the whole step.
    hysteresis: relative gain that plain decoding must be beaten by before speculation (re)starts,
    and that a wait must promise.
    probe_interval: steps after which a stale measurement is refreshed, per bucket of sequences.
    first_nodes: draft nodes per sequence of the first speculative step.
    max_slowdown, slack_steps: of the guards.
    """

    max_draft_tokens: int
    max_step_nodes: int = EDGES[-1]
    hysteresis: float = 0.03
    probe_interval: int = 128
    first_nodes: int = 4
    max_slowdown: float = 0.02
    slack_steps: float = 8.0
