"""The inputs and outputs of a forward, whichever way it is run."""

from __future__ import annotations

import torch

from cluster.engine.attention.seam import AttentionStep
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
    plan: AttentionStep
    taps: tuple[int, ...] = ()
    adapters: torch.Tensor | None = None


@record
class StepOutputs:
    """logits: float32 [wanted, vocab].  taps: [rows, taps, hidden], None where none were asked.
    events: None on a CPU."""

    logits: torch.Tensor
    taps: torch.Tensor | None = None
    events: Events | None = None


class TapStates:
    """Copies of the hidden states that a step taps, made at once: a layer may go on in the same
    memory.

    rows: [rows, taps, hidden]; None where none are asked for."""

    def __init__(self, inputs: StepInputs) -> None:
        self._taps = inputs.taps
        self._device = inputs.token_ids.device
        self.rows: torch.Tensor | None = None

    def take(self, tap: int, hidden: torch.Tensor) -> None:
        """hidden: [rows, hidden], the states of that tap, which need not be asked for."""
        for column, each in enumerate(self._taps):
            if each == tap:
                if self.rows is None:
                    shape = len(hidden), len(self._taps), hidden.shape[1]
                    self.rows = torch.empty(shape, dtype=hidden.dtype, device=self._device)
                self.rows[:, column] = hidden
