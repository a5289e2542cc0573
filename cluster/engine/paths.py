"""The inputs and outputs of a forward."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.engine.attention.seam import PathPlan
from cluster.records import record

# On a GPU: before and behind a forward.
Events = tuple[torch.cuda.Event, torch.cuda.Event]


@record
class StepInputs:
    """One forward's rows, on the model's device.

    token_ids, positions: int64[rows].  logit_rows: int64[wanted], the rows whose logits are asked
    for.  plan: the attention of all layers, which knows who sees whom and writes to the cache.
    taps: of all rows, see `cluster.engine.taps`; resolved.  adapters: int64[rows], 0 = none; None
    where no row has one.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    plan: PathPlan
    taps: tuple[int, ...] = ()
    adapters: torch.Tensor | None = None


@record
class StepOutputs:
    """logits: float32 [wanted, vocab].  taps: [rows, taps, hidden], None where none were asked.
    events: None on a CPU."""

    logits: torch.Tensor
    taps: torch.Tensor | None = None
    events: Events | None = None


class Path(Protocol):
    """One way of running a model's forward."""

    def __call__(self, inputs: StepInputs, /) -> StepOutputs | None:
        """None: this step is not one that it is made for, and nothing was done; the next one is
        asked."""
        ...
